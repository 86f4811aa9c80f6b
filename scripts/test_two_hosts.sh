#!/usr/bin/env bash
# Trains one step on two "hosts": network namespaces joined by a virtual cable, so that messages go
# over TCP and not through shared memory. Needs root and iproute2, MPICH's mpirun, and an
# environment in which gluon_syncbn is importable. PYTHON chooses the interpreter (python).
set -eu
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python}")
mpirun=$(dirname "$python")/mpirun
hosts=(syncbn-a syncbn-b)

clean() {
    for host in "${hosts[@]}"; do ip netns delete "$host" 2>/dev/null || true; done
}
trap clean EXIT
clean
for host in "${hosts[@]}"; do ip netns add "$host"; done
ip link add cable0 netns "${hosts[0]}" type veth peer name cable1 netns "${hosts[1]}"
for k in 0 1; do
    ip -n "${hosts[$k]}" address add "10.99.0.$((k + 1))/24" dev "cable$k"
    ip -n "${hosts[$k]}" link set "cable$k" up
    ip -n "${hosts[$k]}" link set lo up
done

# Hydra starts its proxies through this instead of ssh: HOST COMMAND...
remote=$(mktemp)
cat >"$remote" <<'REMOTE'
#!/usr/bin/env bash
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case $host in 10.99.0.1) space=syncbn-a ;; *) space=syncbn-b ;; esac
exec ip netns exec "$space" unshare --uts --ipc --mount bash -c "hostname $space
mount -t tmpfs tmpfs /dev/shm; $*"
REMOTE
chmod +x "$remote"

ip netns exec "${hosts[0]}" timeout 120 "$mpirun" -launcher ssh -launcher-exec "$remote" \
    -hosts 10.99.0.1:1,10.99.0.2:1 -n 2 -env PYTHONPATH "$PWD" -env MPIR_CVAR_NOLOCAL 1 \
    -env FI_PROVIDER tcp -env FI_TCP_IFACE cable0 \
    "$python" -c '
import time
import mxnet as mx, numpy as np
from mxnet import autograd
from gluon_syncbn import SyncBatchNorm, distributed
distributed.init(60)
rank = distributed.rank()
layer = SyncBatchNorm(in_channels=1, momentum=0)
layer.initialize()
x = mx.nd.array([[4.0 * rank], [4.0 * rank + 2]])
x.attach_grad()
with autograd.record():
    y = layer(x)
y.backward()
x.grad.wait_to_read()
assert layer.running_mean.data().asscalar() == 3, layer.running_mean.data()
assert distributed.local_size() == 1, distributed.local_size()
seconds = []
for _ in range(500):
    begin = time.perf_counter()
    distributed.allreduce(np.ones(512))
    seconds.append(time.perf_counter() - begin)
if rank == 0:
    print(f"two hosts, 4 KB: median {1e6 * np.median(seconds):.0f} us")
'
rm "$remote"
