# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# lib.sh: shared by the scripts of this folder; to be sourced.
#
# Nothing here mounts outside a private mount namespace: after a crash nothing stays
# mounted, and removing a root can never reach the host's /dev or /proc.

cache=${METAROCE_CACHE:-/var/cache/metaroce}
jobs=${JOBS:-$(nproc)}

# step TEXT: progress for the reader, on stderr; stdout carries results.
step() { printf '>> %s %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
die() { printf 'metaroce: %s\n' "$*" >&2; exit 1; }
# need_root: what every step that enters the build root needs.
need_root() {
    [ "$(id -u)" = 0 ] || die "this step needs root (it makes and enters a build root): run it with sudo"
    unshare --mount true 2>/dev/null ||
        die "this machine refuses mount namespaces: in a container, give it CAP_SYS_ADMIN (docker: --privileged)"
    mkdir -p "$cache" || die "cannot make $cache: METAROCE_CACHE names another folder"
    [ "$(df -Pk "$cache" | awk 'NR == 2 { print int($4 / 1048576) }')" -ge 3 ] ||
        die "less than 3 GB are free in $cache (a first build needs 10): make room, or name another folder by METAROCE_CACHE"
}

# checkout_key: a short name for this checkout; what is built from it lies under that name.
checkout_key() { (cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P) | sha256sum | cut -c1-8; }

# host_mirror: the Debian mirror that this machine's apt uses.
host_mirror() {
    local m
    m=${METAROCE_MIRROR:-}
    # A machine that has just been made has no package lists yet.
    [ -n "$m" ] || apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -q . ||
        apt-get update -qq >&2 || true
    [ -n "$m" ] || m=$(apt-get indextargets --format '$(ORIGIN) $(SUITE) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        awk '$1 == "Debian" && $2 !~ /security/ { print $NF; exit }')
    [ -n "$m" ] || m=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
        grep -m1 '/debian/\?$')
    [ -n "$m" ] || die "no Debian mirror in this machine's apt configuration: run 'apt-get update', or set METAROCE_MIRROR"
    echo "$m"
}

# remove_tree DIR: removes a root; refuses to while something is mounted below it.
remove_tree() {
    [ -e "$1" ] || return 0
    ! grep -q " $1/" /proc/mounts || die "something is still mounted below $1"
    rm -rf --one-file-system "$1"
}

# enter ROOT COMMAND [BIND...]: runs COMMAND with bash in ROOT; each BIND is a host path
# (or SRC:DST) that is bound in. Mounts live in a namespace that ends with the command. The command
# is killed when the caller dies, and with a PID namespace all that it has started.
enter() {
    local root=$1 command=$2
    shift 2
    # ENTER_UNSHARE adds options of unshare, such as a PID namespace.
    # shellcheck disable=SC2086
    setpriv --pdeathsig KILL unshare --mount --propagation private ${ENTER_UNSHARE:-} -- bash -c '
        set -e
        root=$1 command=$2
        shift 2
        mkdir -p "$root/proc" "$root/sys" "$root/dev"
        mount -t proc proc "$root/proc"
        mount --rbind /sys "$root/sys" 2>/dev/null || true
        mount --rbind /dev "$root/dev"
        for b in "$@"; do
            src=${b%%:*} dst=${b#*:}
            if [ -d "$src" ]; then mkdir -p "$root$dst"; else mkdir -p "$(dirname "$root$dst")"; touch "$root$dst"; fi
            mount --bind "$src" "$root$dst"
        done
        exec chroot "$root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
            ${no_proxy:+no_proxy="$no_proxy"} ${JOBS:+JOBS="$JOBS"} bash -c "$command"
    ' enter "$root" "$command" "$@"
}
