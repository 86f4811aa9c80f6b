# The older system in which a wheel is built: Debian 11 (glibc 2.31, g++ 10) with CUDA 11.2, the
# version of mxnet-cu112. Sourced by wheels.sh. It knows nothing of what is built there.

ROOT_PACKAGES="ca-certificates g++ python3-venv nvidia-cuda-toolkit nvidia-cuda-dev"

# Why this machine cannot make or enter such a root; nothing where it can.
why_no_root() {
    if [ "$(id -u)" != 0 ]; then
        echo "only the user root can enter a root of Debian 11"
    elif ! unshare --mount --pid --fork true 2>/dev/null; then
        echo "this machine does not let its root mount anything, as in many containers"
    elif [ ! -d "$1" ] && ! command -v debootstrap >/dev/null; then
        echo "debootstrap is not installed, which makes a root of Debian 11"
    fi
}

# For as long as the command runs; MPI needs the latter two.
MOUNT_AND_ENTER='mount -t proc proc "$1/proc" && mount -t sysfs sysfs "$1/sys" && '
MOUNT_AND_ENTER+='mount -t tmpfs tmpfs "$1/dev/shm" && exec chroot "$@"'

# in_root ROOT COMMAND...: runs it there with a clean environment. Addresses and certificates of
# servers are those of this machine.
in_root() {
    local root=$1 name file kept=()
    shift
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST PIP_DEFAULT_TIMEOUT \
        http_proxy https_proxy no_proxy GLUON_SYNCBN_CUDA CUDAARCHS DEMO; do
        if [ -n "${!name:-}" ]; then kept+=("$name=${!name}"); fi
    done
    for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
        if [ -e "$file" ] && [ -d "$root${file%/*}" ]; then
            cp --remove-destination -L "$file" "$root$file"
        fi
    done
    unshare --mount --pid --fork sh -c "$MOUNT_AND_ENTER" in_root "$root" env -i "${kept[@]}" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        PIP_CERT=/etc/ssl/certs/ca-certificates.crt LC_ALL=C.UTF-8 \
        DEBIAN_FRONTEND=noninteractive "$@"
}

# make_root ROOT: makes it, if it is not there; it gets its name when it is complete.
make_root() {
    local root=$1 part=$1.part
    if [ -d "$root" ]; then return; fi
    echo "making $root: Debian 11 with CUDA 11.2, 5 GB, some 15 minutes"
    rm -rf "$part"
    mkdir -p "$(dirname "$root")"
    {
        debootstrap --variant=minbase --components=main,contrib,non-free bullseye "$part" \
            ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"} &&
            in_root "$part" apt-get update &&
            in_root "$part" apt-get install -y --no-install-recommends $ROOT_PACKAGES &&
            in_root "$part" apt-get clean
    } >"$root.log" 2>&1 && mv "$part" "$root"
}
