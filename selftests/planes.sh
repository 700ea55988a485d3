#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# planes.sh PLANES [CASE...]: devices over several netdevs. One host (qemu-test/run --hosts 1
# --no-device); makes two namespaces, which PLANES links join (2 to 8), each a network of its own:
#
#     pl-a eth0 10.94.0.1 ---- veth ---- eth0 10.94.0.2 pl-b       mtu 4200
#          eth1 10.94.1.1 ---- veth ---- eth1 10.94.1.2
#          ...
#          control 10.94.9.1 -- veth -- control 10.94.9.2
#
# with fd94:K::1 and fd94:K::2. eth0 is the netdev that a device is made over, the others are its
# planes. What the two programs tell each other by TCP goes over the link of its own.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
usage="usage: planes.sh PLANES [CASE...]"
PLANES=${1:?$usage}
shift
work=$(mktemp -d)
last=$((PLANES - 1))
dmesg_lines=$(dmesg | wc -l)

on() { ip netns exec "pl-$1" "${@:2}"; }
host() { if [ "$1" = a ]; then echo 1; else echo 2; fi; }
all() { seq 0 "$last"; }
others() { seq 1 "$last"; }

# wire NAME NET: joins the namespaces by a link.
wire() {
    local n
    ip link add "$1" netns pl-a mtu 4200 type veth peer name "$1" netns pl-b
    ip -n pl-b link set "$1" mtu 4200
    for n in a b; do
        ip -n "pl-$n" address add "10.94.$2.$(host $n)/24" dev "$1"
        [ ! -d /proc/sys/net/ipv6 ] || ip -n "pl-$n" address add "fd94:$2::$(host $n)/64" dev "$1" nodad
        ip -n "pl-$n" link set "$1" up
    done
}
# up: namespaces and links; devices: a device of one plane in each.
up() {
    local n k
    down
    for n in a b; do
        ip netns add "pl-$n"
        ip -n "pl-$n" link set lo up
        apart $n
    done
    wire control 9
    for k in $(all); do wire "eth$k" "$k"; done
}
# apart NS: it answers on each link for the address of that link, as if these were networks
# apart; together NS: on each for all.
apart() { on "$1" sysctl -qw net.ipv4.conf.all.arp_ignore=1; }
together() { on "$1" sysctl -qw net.ipv4.conf.all.arp_ignore=0; }
devices() {
    local n
    for n in a b; do on $n rdma link add "pl$n" type "$KIND" netdev eth0; done
    for n in a b; do busywait 10 gid $n; done
}
down() {
    local n link
    for n in $(spaces); do
        ip netns pids "pl-$n" | xargs -r kill -KILL 2>/dev/null || :
        # A link may be going already, with a netdev whose peer has gone.
        for link in $(links "$n"); do on "$n" rdma link delete "$link" || :; done
    done
    for n in $(spaces); do ip netns delete "pl-$n"; done
}
spaces() { ip netns list | sed -n 's/^pl-\([^ ]*\).*/\1/p'; }
trap 'down; rm -rf "$work"' EXIT
links() { on "$1" rdma link 2>/dev/null | awk '$1 == "link" { sub("/.*", "", $2); print $2 }'; }
no_link_in() { [ -z "$(links "$1")" ]; }

# gid NS: index of the RoCE v2 GID of the IPv4 address of eth0, or with FAMILY=6 of the IPv6 one.
gid() {
    local gid="0000:0000:0000:0000:0000:ffff:0a5e:000$(host "$1")"
    [ "${FAMILY:-4}" = 4 ] || gid="fd94:0000:0000:0000:0000:0000:0000:000$(host "$1")"
    gid_of "pl-$1" "pl$1" "$gid"
}

# plane NS WHAT TEXT...: writes into a file of the device's planes; listed NS: the list.
plane() { on "$1" bash -c 'echo "'"${*:3}"'" >"/sys/class/infiniband/pl'"$1"'/planes/'"$2"'"'; }
listed() { on "$1" cat "/sys/class/infiniband/pl$1/planes/list"; }
# state NS K STATE: plane K of the device is in that state; unlisted NS NETDEV: it is none.
state() { listed "$1" | has "^$2 eth$2 $3"; }
unlisted() { ! listed "$1" | has " $2 "; }
add_planes() {
    local k
    for k in $(others); do plane "$1" add "eth$k"; done
}

# sent NS: bytes that each of its netdevs has sent, in a line; word K LINE: that of plane K.
sent() { on "$1" bash -c 'for ((k = 0; k < '"$PLANES"'; k++)); do printf "%s " $(cat /sys/class/net/eth$k/statistics/tx_bytes 2>/dev/null || echo 0); done'; }
word() { awk -v k="$1" '{ print $(k + 1) + 0 }' <<<"$2"; }
# carries NS K BYTES LINE: plane K has sent so much since LINE.
carries() { [ $(($(word "$2" "$(sent "$1")") - $(word "$2" "$4"))) -ge "$3" ]; }
all_carry() { # NS BYTES LINE
    local k
    for k in $(all); do carries "$1" "$k" "$2" "$3" || return 1; done
}
# without_carries NS K BYTES LINE: the planes other than K have, together.
without_carries() {
    local now
    now=$(sent "$1")
    [ "$(paste -d ' ' <(tr ' ' '\n' <<<"$4") <(tr ' ' '\n' <<<"$now") |
        awk -v k="$2" 'NF == 2 { if (n++ != k) sum += $2 - $1 } END { print sum + 0 }')" -ge "$3" ]
}
# shares NS LINE: what each plane has sent since LINE is 0.5 to 2 of the even share.
shares() {
    paste -d ' ' <(tr ' ' '\n' <<<"$2") <(sent "$1" | tr ' ' '\n') | awk -v n="$PLANES" '
        NF == 2 { got[k++] = $2 - $1; total += $2 - $1 }
        END {
            for (i = 0; i < k; i++) {
                share = total ? got[i] / total : 0
                printf "plane %d %12d bytes  %5.1f %% (even: %.1f %%)\n", i, got[i], share * 100, 100 / n
                if (share < 0.5 / n || share > 2 / n) bad = 1
            }
            exit bad
        }'
}

# start PROGRAM [options of the connecting end]: both ends in the background.
start() {
    local program=$1 common=()
    shift
    # Which cases are to be run is for both ends to know.
    [ "$program" != mroce-dv ] || { common=("$@") && set --; }
    ip netns exec pl-b "$program" --dev plb --gid "$(gid b)" --listen 18515 "${common[@]}" >"$work/server" 2>&1 &
    listener=$!
    ip netns exec pl-a "$program" --dev pla --gid "$(gid a)" --connect 10.94.9.2 "${common[@]}" "$@" >"$work/client" 2>&1 &
    client=$!
    trap after_failure EXIT
}
# In the subshell of a case that fails in between.
after_failure() {
    local status=$? n
    trap - EXIT
    set +e
    [ $status = 0 ] && exit 0
    echo "what the ends had said, and how they were:"
    cat "$work/client" "$work/server"
    for n in a b; do
        listed $n
        on $n rdma -dd resource show qp
        sent $n
    done
    kill_ends
    exit $status
}
kill_ends() {
    kill -KILL "$client" "$listener" 2>/dev/null || :
    wait "$client" "$listener" 2>/dev/null || :
}
ended() { ! kill -0 "$client" 2>/dev/null; }
ended_or() { ended || "$@"; }
# writes, reads: a stream of data from a to b, or to a from b, until kill_ends.
writes() { start mroce-bench --tests write_bw --seconds 120 --timeout 17; }
reads() { start mroce-bench --tests read_bw --seconds 120 --timeout 17; }
# verified SECONDS [SUITES]: traffic whose every byte is checked; reap SECONDS: it ends within that
# time, without an error.
verified() { start mroce-verify --short --seconds "$1" --timeout 17 --suites "${2:-random,flag_after_data}" --max-size 300k; }
reap() {
    local status=0
    busywait "$1" ended || { kill -KILL "$client" "$listener"; status=1; }
    wait "$client" || status=1
    wait "$listener" || status=1
    [ $status != 0 ] || grep -E '^# totals' "$work/client" || :
    return $status
}

# clean_kernel: since the last call the kernel has had nothing to complain about.
clean_kernel() {
    local said
    said=$(dmesg | tail -n "+$((dmesg_lines + 1))" | grep -E 'WARNING:|BUG:|Oops|Call Trace|refcount|leak|hung|lockdep|unregister_netdevice' || true)
    dmesg_lines=$(dmesg | wc -l)
    [ -z "$said" ] || { echo "$said"; return 1; }
}
closed() { [ -z "$(on "$1" ss -Huan "sport = :4795")" ]; }

# both: two devices with all planes, all of them up.
both() {
    local n k
    up
    devices
    for n in a b; do
        add_planes $n
        for k in $(all); do busywait 5 state $n "$k" up; done
    done
}

# ---------------------------------------------------------------- cases

# What is written is refused with the errno that verbs/planes.rs states, and nothing changes.
refusals() {
    up
    devices
    local before k
    before=$(listed a)
    echo "$before"
    [ "$before" = "0 eth0 up 10.94.0.1" ] || [[ $before == "0 eth0 up 10.94.0.1 "* ]] || return 1
    refused "Invalid argument" plane a add ""
    refused "Invalid argument" plane a add "eth1 8"
    refused "Invalid argument" plane a add "eth1 10"
    refused "Invalid argument" plane a add "eth1 -1"
    refused "Invalid argument" plane a add "eth1 one"
    refused "Invalid argument" plane a add "eth1 1 1"
    refused "Invalid argument" plane a add "a-name-of-16-byte"
    refused "Invalid argument" plane a add lo
    refused "No such device" plane a add none0
    refused "File exists" plane a add eth0
    refused "File exists" plane a add "eth1 0"
    refused "No such file" plane a del eth1
    refused "No such file" plane a drain eth1
    refused "No such file" plane a resume eth1
    refused "Invalid argument" plane a del "eth0 0"
    refused "busy" plane a del eth0
    refused "not permitted" on a setpriv --bounding-set -net_admin bash -c 'echo eth1 >/sys/class/infiniband/pla/planes/add'
    refused "ermission denied" on a setpriv --reuid 65534 --clear-groups bash -c 'echo eth1 >/sys/class/infiniband/pla/planes/add'
    refused "Invalid argument" plane a controller reno
    refused "not permitted" on a setpriv --bounding-set -net_admin bash -c 'echo fixed >/sys/class/infiniband/pla/planes/controller'
    refused "ermission denied" on a setpriv --reuid 65534 --clear-groups bash -c 'echo fixed >/sys/class/infiniband/pla/planes/controller'
    [ "$(on a cat /sys/class/infiniband/pla/planes/controller)" = "[aimd] fixed" ] || return 1
    [ "$(listed a)" = "$before" ] || { listed a; return 1; }
    # A netdev is one plane of one device.
    plane a add "eth1 5"
    listed a | has '^5 eth1 up' || { listed a; return 1; }
    refused "File exists" plane a add eth1
    refused "File exists" on a rdma link add pla2 type "$KIND" netdev eth1
    ip -n pl-a link add eth8 type dummy
    on a rdma link add pla2 type "$KIND" netdev eth8
    refused "File exists" plane a add eth8
    on a rdma link delete pla2
    # Eight, and not one more; the lowest free id is taken.
    for k in 10 11 12 13 14 15 16; do ip -n pl-a link add "eth$k" type dummy; done
    for k in 10 11 12 13 14 15; do plane a add "eth$k"; done
    refused "No space" plane a add eth16
    listed a
    [ "$(listed a | awk '{ print $1 $2 }' | tr '\n' ' ')" = "0eth0 1eth10 2eth11 3eth12 4eth13 5eth1 6eth14 7eth15 " ] || return 1
    listed a | has '^7 eth15 down' || return 1
    on a rdma link delete pla
    down
}

# All planes carry what one QP writes, and what it reads.
all_planes_carry() {
    local test before
    both
    for test in writes:a reads:b; do
        "${test%:*}"
        before=$(sent "${test#*:}")
        busywait 10 all_carry "${test#*:}" 200000 "$before"
        before=$(sent "${test#*:}")
        busywait 20 all_carry "${test#*:}" 4000000 "$before"
        echo "${test%:*}:"
        shares "${test#*:}" "$before" || { echo "a plane has less than half or more than double of the even share"; return 1; }
        kill_ends
    done
    down
}

ipv6_planes_carry() {
    [ -d /proc/sys/net/ipv6 ] || { echo "no IPv6"; return 4; }
    FAMILY=6 all_planes_carry
}

# Which of two devices a packet is for is told by the plane it comes in on.
beside_another_device() {
    local before
    both
    for n in a b; do
        ip -n pl-$n link add eth8 type dummy
        ip -n pl-$n link set eth8 up
        on $n rdma link add "pl${n}2" type "$KIND" netdev eth8
    done
    before=$(sent a)
    verified 2
    reap 40
    all_carry a 50000 "$before"
    down
}

# fail_down K, heal_down K: the link is switched off at one end, both see it. fail_silent K,
# heal_silent K: packets vanish, nobody is told.
fail_down() { ip -n pl-b link set "eth$1" down; }
heal_down() { ip -n pl-b link set "eth$1" up; }
fail_silent() {
    local n
    for n in a b; do on $n tc qdisc add dev "eth$1" root netem loss 100%; done
}
heal_silent() {
    local n
    for n in a b; do on $n tc qdisc delete dev "eth$1" root; done
}

# cut_verified MODE: planes fail in turn, that of the device's own netdev first, while every
# byte is checked; each carries again once it is back. (One QP has to do: the RDMA core connects
# none while that netdev leads nowhere.)
cut_verified() {
    local k=0 cuts=0 before
    both
    before=$(sent a)
    verified "${VERIFY_SECONDS:-20}" flag_after_data
    busywait 15 all_carry a 100000 "$before"
    while ! ended; do
        "fail_$1" $k
        before=$(sent a)
        busywait 15 ended_or without_carries a $k 300000 "$before" || { "heal_$1" $k; return 1; }
        "heal_$1" $k
        before=$(sent a)
        busywait 15 ended_or carries a $k 50000 "$before"
        ended || cuts=$((cuts + 1))
        k=$(((k + 1) % PLANES))
    done
    reap 30
    echo "$cuts planes failed and came back"
    [ $cuts -ge 2 ] || { echo "too few"; return 1; }
    down
}
planes_go_down_data_verified() { cut_verified down; }
planes_fail_silently_data_verified() { cut_verified silent; }

# quiet NS K: over a moment in which the others carry 2 MB the plane carries at most 20 KB (ARP,
# questions whether it is back).
quiet() {
    local before
    before=$(sent "$1")
    busywait 10 without_carries "$1" "$2" 2000000 "$before" || return 1
    ! carries "$1" "$2" 20000 "$before"
}

# Under traffic planes are added at one end and the other, drained, resumed, removed.
added_and_removed() {
    local k before
    up
    devices
    writes
    before=$(sent a)
    busywait 10 carries a 0 1000000 "$before"
    before=$(sent a)
    # What one end has alone leads nowhere here: these are networks apart.
    add_planes a
    quiet a "$last"
    add_planes b
    busywait 10 all_carry a 1000000 "$before"
    # One is to be left by either end, without loss; and taken again.
    for n in a b; do
        plane $n drain "eth$last"
        state $n "$last" draining
        busywait 10 quiet a "$last"
        plane $n resume "eth$last"
        before=$(sent a)
        busywait 10 carries a "$last" 1000000 "$before"
    done
    # That of the device's own netdev.
    plane b drain eth0
    busywait 10 quiet a 0
    plane b resume eth0
    before=$(sent a)
    busywait 10 carries a 0 1000000 "$before"
    # Removed at one end it is used by none.
    plane b del "eth$last"
    unlisted b "eth$last"
    busywait 10 quiet a "$last"
    plane b add "eth$last"
    before=$(sent a)
    busywait 10 carries a "$last" 1000000 "$before"
    for k in $(others); do plane a del "eth$k"; done
    busywait 10 quiet a "$last"
    [ "$(listed a | wc -l)" = 1 ]
    kill_ends
    down
}

# The netdev of a plane goes, its address, and it itself to another namespace: so goes the plane.
netdev_and_address_go() {
    local before
    both
    before=$(sent a)
    verified 12
    busywait 15 all_carry a 100000 "$before"
    ip -n pl-a address del "10.94.$last.1/24" dev "eth$last"
    before=$(sent a)
    busywait 5 without_carries a "$last" 300000 "$before"
    ip -n pl-a address add "10.94.$last.1/24" dev "eth$last"
    busywait 5 state a "$last" up
    before=$(sent a)
    busywait 10 carries a "$last" 100000 "$before"
    # Both netdevs go.
    ip -n pl-a link delete "eth$last"
    for n in a b; do busywait 5 unlisted $n "eth$last"; done
    before=$(sent a)
    busywait 5 without_carries a "$last" 300000 "$before"
    # Another one takes its place.
    wire "eth$last" "$last"
    for n in a b; do plane $n add "eth$last $last"; done
    busywait 10 carries a "$last" 100000 "$(sent a)"
    # To another namespace.
    ip netns add pl-c
    ip -n pl-b link set "eth$last" netns pl-c
    busywait 5 unlisted b "eth$last"
    state a "$last" '' # down, but there
    ended && { echo "the traffic ended too early"; return 1; }
    reap 40
    ip netns delete pl-c
    busywait 5 unlisted a "eth$last"
    clean_kernel
    down
}

# Ends with different numbers of planes.
asymmetric() {
    local n before k
    up
    devices
    # Networks apart: what both have is used.
    add_planes a
    for k in $(others); do ip -n pl-b link set "eth$k" down; done
    before=$(sent a)
    verified 2
    reap 40
    for k in $(others); do carries a "$k" 100000 "$before" && { echo "plane $k leads nowhere"; return 1; }; done
    # One network: the end with more planes sends on all of them.
    together a
    together b
    for k in $(others); do ip -n pl-b link set "eth$k" up; done
    for k in $(others); do busywait 5 state a "$k" up; done
    writes
    before=$(sent a)
    busywait 20 all_carry a 1000000 "$before"
    before=$(sent a)
    busywait 20 all_carry a 4000000 "$before"
    shares a "$before"
    kill_ends
    before=$(sent a)
    verified 2
    reap 40
    all_carry a 50000 "$before"
    down
}

# Devices, module and namespaces go while planes carry traffic.
deleted_under_traffic() {
    local n before
    both
    writes
    before=$(sent a)
    busywait 10 all_carry a 100000 "$before"
    for n in a b; do on $n rdma link delete "pl$n"; done
    kill_ends
    for n in a b; do busywait 5 closed $n; done
    # They were planes; now they are free.
    devices
    for n in a b; do add_planes $n; done
    writes
    before=$(sent a)
    busywait 10 all_carry a 100000 "$before"
    # With the netdev the device goes.
    ip -n pl-a link delete eth0
    for n in a b; do busywait 10 no_link_in $n; done
    kill_ends
    for n in a b; do busywait 5 closed $n; done
    clean_kernel
    down
}
unloaded_under_traffic() {
    local before
    both
    writes
    before=$(sent a)
    busywait 10 all_carry a 100000 "$before"
    # While planes come and go.
    (while :; do plane a del "eth$last" && plane a add "eth$last" || break; done 2>/dev/null) &
    local changer=$!
    rmmod "$KIND"
    kill_ends
    wait $changer || :
    modprobe "$KIND"
    clean_kernel
    down
}
namespace_destroyed() {
    local before
    both
    writes
    before=$(sent a)
    busywait 10 all_carry a 100000 "$before"
    kill_ends
    ip netns delete pl-a
    busywait 20 no_link_in b # its netdevs go with their peers
    busywait 5 closed b
    ip netns delete pl-b
    busywait 20 unused
    clean_kernel
}
unused() { [ "$(awk -v m="$KIND" '$1 == m { print $3 }' /proc/modules)" = 0 ]; }

# Programs see on which planes their paths are, and are told when that changes.
extension_tells_planes() {
    both
    start mroce-dv planes
    reap 60
    cat "$work/client"
    ! grep -q SKIP "$work/client"
    down
}

cases=(refusals all_planes_carry ipv6_planes_carry beside_another_device planes_go_down_data_verified planes_fail_silently_data_verified
    added_and_removed netdev_and_address_go asymmetric extension_tells_planes deleted_under_traffic
    unloaded_under_traffic namespace_destroyed)
[ $# = 0 ] || cases=("$@")
plan ${#cases[@]}
note "$PLANES planes"
for c in "${cases[@]}"; do run_case "$c"; done
finish
