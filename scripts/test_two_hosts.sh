#!/usr/bin/env bash
# Exchanges between two "hosts": network namespaces joined by a virtual cable, so that messages go
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
import gluon_syncbn
import mxnet as mx
from gluon_syncbn import distributed
distributed.init(60)
layer = gluon_syncbn.SyncBatchNorm(in_channels=1, momentum=0)
layer.initialize()
with mx.autograd.train_mode():
    layer(mx.nd.full((1, 1), distributed.rank() * 2)).wait_to_read()
assert layer.running_mean.data().asscalar() == 1
assert distributed.local_size() == 1, distributed.local_size()
print("rank", distributed.rank(), "exchanges over TCP")
'
rm "$remote"
