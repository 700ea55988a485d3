#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# lifecycle.sh [ROUNDS [CASE...]]: load, add, traffic, kill, delete, unload, ROUNDS times (default 100,
# the first ten to warm up), and unloading in every situation that a user meets. One host
# (qemu-test/run --hosts 1 --no-device); makes two namespaces joined by veth, which stay:
#
#     lc-a eth0 10.95.0.1 ---- veth ---- eth0 10.95.0.2 lc-b       mtu 4200
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
. ./pair.sh lc 10.95.0
ROUNDS=${1:-100}
[ $# = 0 ] || shift
WARMUP=10
[ "$ROUNDS" -gt "$WARMUP" ] || { echo "lifecycle.sh: more than $WARMUP rounds are needed"; exit 2; }
PORT=4795                # UDP port of the transport
# KiB by which unreclaimable slab may grow after the warm-up; and within the second half of a
# long run, where the caches of the kernel have reached their size (that takes some thirty
# rounds, without any leak about 500 KiB): a leak of 4 KiB in each
# round does not pass.
: "${TOLERANCE:=$(slab_tolerance)}" "${TOLERANCE_HALF:=192}"
: "${SEED:=$((EPOCHSECONDS % 30000))}"
work=$(mktemp -d)

# choose N: a number below N; the sequence follows from SEED (that of RANDOM ends at a subshell).
choose() {
    local state
    state=$(cat "$work/random" 2>/dev/null || echo "$SEED")
    state=$(((state * 1103515245 + 12345) & 0x7fffffff))
    echo "$state" >"$work/random"
    echo $(((state >> 12) % $1))
}

trap 'down; rm -rf "$work"' EXIT

loaded() { grep -q "^$KIND " /proc/modules; }
unloaded() { ! loaded || rmmod "$KIND"; }
no_device_in() { ! device_in "$1"; }
# The GID of the IPv4 address is there.
ready() {
    on "$1" bash -c '
        for f in /sys/class/infiniband/lc'"$1"'/ports/1/gids/*; do
            [ "$(cat $f)" != "0000:0000:0000:0000:0000:ffff:0a5f:000'"$([ "$1" = a ] && echo 1 || echo 2)"'" ] || exit 0
        done
        exit 1'
}
add() {
    add_links || return 1
    busywait 10 ready a
    busywait 10 ready b
}

# traffic TEST: both ends, whose QPs wait for a busy machine, in the background (no function, whose shell would be what is killed); true once several packets of data have arrived.
# With GID_A and GID_B between these GIDs.
traffic() {
    ip netns exec lc-b mroce-bench --dev lcb ${GID_B:+--gid "$GID_B"} --listen 18515 --wait 60 >"$work/server" 2>&1 &
    listener=$!
    ip netns exec lc-a mroce-bench --dev lca ${GID_A:+--gid "$GID_A"} --connect 10.95.0.2 --tests "$1" --seconds 60 --timeout 18 --wait 60 >"$work/client" 2>&1 &
    client=$!
    busywait 60 flowing || { cat "$work/client" "$work/server"; return 1; }
}
received() { on "$1" cat "/sys/class/infiniband/lc$1/ports/1/hw_counters/rcvd_bytes"; }
flowing() { [ $(($(received a) + $(received b))) -gt 300000 ]; }

gone() { ! kill -0 "$1" 2>/dev/null; }
# kill_ends: kills both ends, in one order or the other, and waits until they are gone.
kill_ends() {
    if [ "$(choose 2)" = 0 ]; then
        kill -KILL "$client" "$listener" 2>/dev/null || true
    else
        kill -KILL "$listener" "$client" 2>/dev/null || true
    fi
    wait "$client" "$listener" 2>/dev/null || true
}
# A moment of 10 to 59 ms in which nothing is waited for: the kill hits another state each time.
moment() { sleep "0.0$(($(choose 50) + 10))"; }

# nothing_left NS: no RDMA object of a user.
nothing_left() {
    local left
    left=$(on "$1" rdma resource show "lc$1") || return 1
    ! grep -qE ' (pd|cq|qp|cm_id|mr|ctx|srq) [1-9]' <<<"$left" || { echo "$left"; return 1; }
}
port_closed() { [ -z "$(on "$1" ss -Huan "sport = :$PORT")" ]; }
unused() { [ "$(awk -v m="$KIND" '$1 == m { print $3 }' /proc/modules)" = 0 ]; }

# clean_kernel: since the last call the kernel has had nothing to complain about. (How much kmemleak
# suspects by itself says nothing: qemu-test/guest asks it in the end, and knows what counts.)
clean_kernel() {
    local said
    said=$(dmesg | tail -n "+$((lines + 1))" | grep -E 'WARNING:|BUG:|Oops|Call Trace|refcount|leak|hung|lockdep' |
        grep -v 'kmemleak: [0-9]* new suspected' || true)
    lines=$(dmesg | wc -l)
    [ -z "$said" ] || { echo "$said"; return 1; }
}

# slab: unreclaimable slab in KiB, after what waits for a grace period is freed.
slab() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
    awk '$1 == "SUnreclaim:" { print $2 }' /proc/meminfo
}
least() { sort -n | head -1; }

# ---------------------------------------------------------------- cases

# Ten rounds of warm-up, then: what is left, and how much memory.
rounds() {
    local i tests=(write_bw read_bw send_bw write_lat send_event_lat write_bw:4096:16:8) before middle after values=()
    for ((i = 1; i <= ROUNDS; i++)); do
        modprobe "$KIND" || { echo "round $i: the module does not load"; return 1; }
        add || { echo "round $i: no devices"; return 1; }
        traffic "${tests[i % ${#tests[@]}]}" || { echo "round $i: no traffic"; return 1; }
        moment
        kill_ends
        for n in a b; do
            busywait 10 nothing_left $n || { nothing_left $n; echo "round $i: objects are left"; return 1; }
        done
        busywait 5 unused || { echo "round $i: $(grep "^$KIND " /proc/modules)"; return 1; }
        case $((i % 4)) in
            0) ;; # The module goes with its devices.
            1)
                # The interfaces go.
                ip -n lc-a link delete eth0
                busywait 10 no_device_in a
                busywait 10 no_device_in b
                wire
                ;;
            *) for n in a b; do on $n rdma link delete lc$n || { echo "round $i: rdma link delete fails"; return 1; }; done ;;
        esac
        if [ $((i % 4)) != 0 ]; then
            for n in a b; do busywait 5 port_closed $n || { echo "round $i: $(on $n ss -Huan)"; return 1; }; done
        fi
        rmmod "$KIND" || { echo "round $i: the module does not unload"; return 1; }
        for n in a b; do port_closed $n || { echo "round $i: $(on $n ss -Huan)"; return 1; }; done
        clean_kernel || { echo "round $i"; return 1; }
        values+=("$(slab)")
        # Memory is compared by the least of several rounds: other things come and go.
        if [ "$i" = "$WARMUP" ]; then before=$(printf '%s\n' "${values[@]: -4}" | least); fi
    done
    after=$(printf '%s\n' "${values[@]: -4}" | least)
    echo "unreclaimable slab, KiB: after $WARMUP rounds $before, after $ROUNDS rounds $after (tolerance $TOLERANCE)"
    if [ "$ROUNDS" -ge 60 ]; then
        middle=$(printf '%s\n' "${values[@]:ROUNDS / 2 - 4:4}" | least)
        echo "after $((ROUNDS / 2)) rounds $middle (tolerance from there on: $TOLERANCE_HALF)"
        [ $((after - middle)) -le "$TOLERANCE_HALF" ] || { echo "it grows: ${values[*]}"; return 1; }
    fi
    echo "each round: ${values[*]}"
    [ $((after - before)) -le "$TOLERANCE" ] || { echo "it grows"; return 1; }
}

# Unload while processes hold contexts, QPs and memory and have requests in flight: the calls
# of the processes fail, they end by themselves, and only then is the rest of their memory freed.
unload_under_open_contexts() {
    local test
    for test in write_bw send_event_lat; do
        modprobe "$KIND"
        add
        traffic $test
        rmmod "$KIND" || { echo "the module does not unload under $test"; return 1; }
        for n in a b; do port_closed $n || { echo "a socket is left: $(on $n ss -Huan)"; return 1; }; done
        # It can be there again, with devices and traffic, before those processes have ended.
        modprobe "$KIND"
        add
        kill_ends
        traffic write_bw
        kill_ends
        for n in a b; do on $n rdma link delete lc$n; done
        busywait 10 unloaded
        clean_kernel
    done
}

# A process that does nothing but hold a context with mapped rings does not notice.
unload_under_an_idle_context() {
    modprobe "$KIND"
    add
    traffic write_bw
    kill -STOP "$client" "$listener"
    rmmod "$KIND"
    kill_ends
    clean_kernel
}

# Processes are killed at random moments while their QPs resend: nothing arrives any more.
case05_killed_while_resending() {
    local i tests=(write_bw read_bw send_bw write_lat)
    modprobe "$KIND"
    add
    for ((i = 0; i < ${KILLS:-8}; i++)); do
        traffic "${tests[i % ${#tests[@]}]}"
        for n in a b; do on $n tc qdisc add dev eth0 root netem loss $((i % 2 ? 100 : 30))%; done
        moment
        kill_ends
        for n in a b; do on $n tc qdisc delete dev eth0 root; done
        for n in a b; do
            busywait 10 nothing_left $n || { nothing_left $n; echo "kill $i: objects are left"; return 1; }
        done
    done
    traffic write_bw
    kill_ends
    # Away at once, in mid-resending of what the kill has left behind.
    busywait 10 unloaded
    clean_kernel
}

# One end crashes, the other one goes on and meets its timeouts; then the module goes.
case04_unloads_after_one_end_crashed() {
    local end
    for end in client listener; do
        modprobe "$KIND"
        add
        traffic write_bw
        kill -KILL "${!end}"
        wait "${!end}" 2>/dev/null || true
        moment
        kill_ends
        for n in a b; do on $n rdma link delete lc$n; done
        busywait 10 unloaded
        for n in a b; do port_closed $n; done
        clean_kernel
    done
}

# Connections without QPs part after four seconds. In that very moment the module goes: no timer and
# no work of what has left the device's table may be left behind.
unload_as_connections_part() {
    local i last since
    for ((i = 0; i < ${PARTINGS:-4}; i++)); do
        modprobe "$KIND"
        add
        traffic write_bw
        kill_ends
        last='' since=$SECONDS
        busywait 30 parting
        rmmod "$KIND" || { echo "the module does not unload"; return 1; }
        clean_kernel
    done
}
# UDP packets that have come, of every kind (sent_pkts of the device is data alone).
heard() {
    for n in a b; do
        on $n awk '$1 == "Udp:" && $2 ~ /^[0-9]/ || $1 == "Udp6InDatagrams" { print $2 }' /proc/net/snmp /proc/net/snmp6
    done
}
# parting: a packet has come after a second of silence, at least: one asks the other to close. (What is
# to be said about QPs that are gone is said at once.)
parting() {
    local now
    now=$(heard)
    [ "$now" != "$last" ] || return 1
    if [ -n "$last" ] && [ $((SECONDS - since)) -ge 2 ]; then return 0; fi
    last=$now since=$SECONDS
    return 1
}

# Rings count for the control group of the program that has them, and go with it.
rings_are_charged() {
    local group=/sys/fs/cgroup/lc-rings pid
    grep -qw memory /sys/fs/cgroup/cgroup.controllers 2>/dev/null || { echo "this kernel has no memory control groups"; return 4; }
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
    modprobe "$KIND"
    add
    mkdir $group
    # What 16,000 receives and their completions take: 16,384 slots of 32 and of 64 bytes.
    bash -c "echo \$\$ >$group/cgroup.procs; exec ip netns exec lc-a ibv_rc_pingpong -d lca -r 16000" >/dev/null 2>&1 &
    pid=$!
    busywait 10 charged $group 1572864 || { cat $group/memory.stat; return 1; }
    echo "$(in_vmalloc $group) bytes"
    { kill -KILL $pid; wait $pid || true; } 2>/dev/null
    busywait 10 uncharged $group
    busywait 10 rmdir $group
    busywait 10 unloaded
    clean_kernel
}
in_vmalloc() { awk '$1 == "vmalloc" { print $2 }' "$1/memory.stat"; }
charged() { [ "$(in_vmalloc "$1")" -ge "$2" ]; }
uncharged() { [ "$(in_vmalloc "$1")" = 0 ]; }

# A device is made over a netdev that just moves to another namespace: it is refused, or goes with
# the netdev, and leaves no port open in the namespace that it was for.
added_while_the_netdev_moves() {
    local i adder made=0
    modprobe "$KIND"
    for ((i = 0; i < ${MOVES:-20}; i++)); do
        ip netns exec lc-a rdma link add lca type "$KIND" netdev eth0 2>/dev/null &
        adder=$!
        sleep "0.00$(choose 10)"
        ip -n lc-a link set eth0 name moved0 netns lc-b
        ! wait $adder || made=$((made + 1))
        busywait 10 no_device_in a || { echo "move $i: $(on a rdma link)"; return 1; }
        busywait 10 port_closed a || { echo "move $i: $(on a ss -Huan)"; return 1; }
        ip -n lc-b link set moved0 name eth0 netns lc-a
        ip -n lc-a link set eth0 up
    done
    echo "$made of $i had been made before"
    ip netns delete lc-a
    busywait 10 unloaded
    clean_kernel
}

# A namespace ends while connections over IPv6 are left in it, whose routes belong to it.
namespace_ends_under_ipv6() {
    [ -d /proc/sys/net/ipv6 ] || { echo "no IPv6"; return 4; }
    local n GID_A GID_B
    modprobe "$KIND"
    for _ in 1 2 3; do
        up
        for n in a b; do ip -n lc-$n address add "$(address6 $n)/64" dev eth0 nodad; done
        add
        for n in a b; do busywait 10 gid6 $n; done
        GID_A=$(gid6 a) GID_B=$(gid6 b)
        traffic write_bw
        on a rdma -dd resource show qp | has 'fd95::2' || { echo "not over IPv6: $(on a rdma -dd resource show qp)"; return 1; }
        kill_ends
        ip netns delete lc-a
        busywait 20 no_device_in b # its netdev goes with its peer
        ip netns delete lc-b
        busywait 20 unused
    done
    busywait 10 unloaded
    clean_kernel
}
address6() { if [ "$1" = a ]; then echo fd95::1; else echo fd95::2; fi; }
# gid6 NS: index of the GID of the IPv6 address.
gid6() {
    gid_of "lc-$1" "lc$1" "fd95:0000:0000:0000:0000:0000:0000:000$([ "$1" = a ] && echo 1 || echo 2)"
}

cases=(rounds unload_under_open_contexts unload_under_an_idle_context unload_as_connections_part
    case05_killed_while_resending case04_unloads_after_one_end_crashed rings_are_charged
    added_while_the_netdev_moves namespace_ends_under_ipv6)
[ $# = 0 ] || cases=("$@")
plan ${#cases[@]}
note "seed $SEED, $ROUNDS rounds"
busywait 10 unloaded
for c in "${cases[@]}"; do
    up
    lines=$(dmesg | wc -l)
    run_case "$c"
    down
    busywait 20 unloaded || note "the module does not unload after $c: $(grep "^$KIND " /proc/modules)"
done
finish
