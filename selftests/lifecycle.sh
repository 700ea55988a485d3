#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# lifecycle.sh [ROUNDS]: load, add, traffic, kill -9, delete, unload, again and again (default
# 100 times). After ten rounds for warming up nothing of ours may be left that was not there,
# and the unreclaimable slab memory may not grow by more than TOLERANCE KiB (default 2048: a
# leak of one 4 KiB object in each of 100 rounds is 400 KiB by itself, so it is looked at per
# round as well: at most 8 KiB). One host (qemu-test/run --hosts 1 --no-module).
#
#     lc1 eth0 ---- veth ---- eth0 lc2      10.98.0.1, 10.98.0.2
set -uo pipefail
cd "$(dirname "$0")"
. ./lib.sh
rounds=${1:-100}
warm=10
: "${TOLERANCE:=2048}"
[ "$rounds" -gt $((warm + 4)) ] || { echo "lifecycle.sh: at least $((warm + 5)) rounds"; exit 2; }

for n in 1 2; do ip netns add lc$n; done
ip link add eth0 netns lc1 mtu 4200 type veth peer name eth0 netns lc2
ip -n lc2 link set eth0 mtu 4200
for n in 1 2; do
    ip -n lc$n link set lo up
    ip -n lc$n link set eth0 up
    ip -n lc$n address add 10.98.0.$n/24 dev eth0
done

in_ns() { ip netns exec "lc$1" "${@:2}"; }
loaded() { grep -q "^$KIND " /proc/modules; }
unload() { ! loaded || rmmod "$KIND"; }
sent() { in_ns 2 cat "/sys/class/infiniband/lcdev2/ports/1/hw_counters/sent_bytes"; }
flowing() { [ "$(sent)" -gt "$1" ]; }
addressed() { in_ns "$1" grep -qs ffff:0a62:000 "/sys/class/infiniband/lcdev$1/ports/1/gids/"*; }
ended() { ! kill -0 "$1"; }
# Memory as it is once what RCU and the workers hold is given back: the lowest of a few looks.
slab() {
    local i low=999999999 now
    echo 3 >/proc/sys/vm/drop_caches
    for i in 1 2 3 4 5; do
        sleep 0.2
        now=$(awk '/^SUnreclaim:/ { print $2 }' /proc/meminfo)
        [ "$now" -ge "$low" ] || low=$now
    done
    echo "$low"
}
# leftovers: what is ours and still there, after unloading.
leftovers() {
    grep "^$KIND " /proc/modules
    rdma dev | grep lcdev
    for n in 1 2; do in_ns $n rdma dev | grep lcdev; in_ns $n ss -Huan 'sport = :4795'; done
    grep -i "^$KIND" /proc/slabinfo 2>/dev/null
    return 0
}

# one ROUND: prints nothing when all is well.
one() {
    local round=$1 server client a b tests
    modprobe "$KIND" || { echo "round $round: modprobe failed"; return 1; }
    for n in 1 2; do
        in_ns $n rdma link add lcdev$n type "$KIND" netdev eth0 || { echo "round $round: rdma link add failed"; return 1; }
    done
    busywait 10 addressed 1 && busywait 10 addressed 2 || return 1
    case $((round % 3)) in
        0) tests=write_bw:64k:16:4 ;;
        1) tests=send_bw:9000:32:2 ;;
        2) tests=read_bw:200k:8:2 ;;
    esac
    in_ns 1 mroce-bench --dev lcdev1 --listen 18515 >/dev/null 2>&1 &
    server=$!
    in_ns 2 mroce-bench --dev lcdev2 --connect 10.98.0.1 --tests $tests --seconds 60 >/dev/null 2>&1 &
    client=$!
    busywait 20 flowing 200000 || { echo "round $round: no traffic"; kill -KILL $server $client; return 1; }
    # In the midst of it: one end, the other, both; or the device goes first.
    case $((round % 4)) in
        0) kill -KILL $client $server ;;
        1) kill -KILL $client; busywait 10 ended $client; kill -KILL $server ;;
        2) kill -KILL $server; busywait 10 ended $server; kill -KILL $client ;;
        3) in_ns 1 rdma link delete lcdev1; kill -KILL $client $server ;;
    esac
    wait $client $server 2>/dev/null
    for n in 1 2; do
        ! in_ns $n rdma dev | grep -q lcdev$n || in_ns $n rdma link delete lcdev$n || { echo "round $round: rdma link delete failed"; return 1; }
    done
    busywait 20 unload || { grep "^$KIND " /proc/modules; return 1; }
}

plan 3
begun=$SECONDS done=0 problem=
for ((round = 1; round <= rounds; round++)); do
    problem=$(one $round 2>&1)
    status=$?
    problem=$(printf '%s\n' "$problem" | grep -v ' Killed ' | sed '/^$/d')
    [ "$status" = 0 ] || break
    done=$round
    [ "$round" != $warm ] || first=$(slab)
    [ $((round % 20)) != 0 ] || note "$round rounds, $((SECONDS - begun)) s"
done
[ -z "$problem" ] || note "$problem"
name="lifecycle_${rounds}_rounds"
if [ "$done" = "$rounds" ]; then ok "$name # $((SECONDS - begun)) s"; else not_ok "$name"; fi

left=$(leftovers)
if [ -z "$left" ]; then ok lifecycle_nothing_left; else note "$left"; not_ok lifecycle_nothing_left; fi

if [ "$done" = "$rounds" ]; then
    last=$(slab)
    growth=$((last - first)) each=$(((last - first) / (rounds - warm)))
    note "unreclaimable slab: $first KiB after $warm rounds, $last KiB after $rounds: $growth KiB, $each KiB a round"
    if [ "$growth" -le "$TOLERANCE" ] && [ "$each" -le 8 ]; then ok lifecycle_slab_does_not_grow; else not_ok lifecycle_slab_does_not_grow; fi
else
    not_ok lifecycle_slab_does_not_grow
fi
for n in 1 2; do
    ! in_ns $n rdma dev | grep -q lcdev$n || in_ns $n rdma link delete lcdev$n
    ip netns delete lc$n
done
unload
finish
