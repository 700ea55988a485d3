#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# soak.sh [MINUTES]: verified traffic for that long (default 30) while the network changes at
# random and programs are killed; then what the kernel holds is compared with what it held
# after the first round. One host (qemu-test/run --hosts 1 --no-device); makes two namespaces:
#
#     so-a eth0 10.93.0.1 ---- veth ---- eth0 10.93.0.2 so-b       mtu 4200
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
. ./pair.sh so 10.93.0
MINUTES=${1:-30}
: "${SEED:=$((EPOCHSECONDS % 30000))}" "${TOLERANCE:=1024}" # KiB of unreclaimable slab
work=$(mktemp -d)
trap 'down; rm -rf "$work"' EXIT
RANDOM=$SEED

# weather: the network becomes another one.
weather() {
    local n=$([ $((RANDOM % 2)) = 0 ] && echo a || echo b) what=$((RANDOM % 8))
    tc -n so-$n qdisc delete dev eth0 root 2>/dev/null
    case $what in
        0) ;;
        1) tc -n so-$n qdisc add dev eth0 root netem loss $((RANDOM % 10 + 1))% limit 20000 ;;
        2) tc -n so-$n qdisc add dev eth0 root netem delay 300us 200us limit 20000 ;;
        3) tc -n so-$n qdisc add dev eth0 root netem duplicate 5% corrupt 1% limit 20000 ;;
        4) tc -n so-$n qdisc add dev eth0 root tbf rate 200mbit burst 20k limit 30k ;;
        5)
            ip -n so-$n link set eth0 down
            sleep 0.2
            ip -n so-$n link set eth0 up
            ;;
        6)
            for m in a b; do ip -n so-$m link set eth0 mtu 1500; done
            sleep 0.5
            for m in a b; do ip -n so-$m link set eth0 mtu 4200; done
            ;;
        7) ip -n so-$n neigh flush dev eth0 ;;
    esac
}
slab() {
    sync
    echo 3 >/proc/sys/vm/drop_caches
    sleep 1
    awk '$1 == "SUnreclaim:" { print $2 }' /proc/meminfo
}
sockets() { for n in a b; do on $n ss -Huan; done | wc -l; }
objects() { for n in a b; do on $n rdma resource show "so$n" | sed 's/.*: //'; done | tr '\n' ' '; }

# A round: traffic, of which every third ends by a kill, under changing weather.
round() {
    local i=$1 server client status=0
    ip netns exec so-a mroce-verify --dev soa --listen 18515 --wait 60 >"$work/server" 2>&1 &
    server=$!
    ip netns exec so-b mroce-verify --dev sob --connect 10.93.0.1 --suites random,many_qps,atomic_sum \
        --short --seconds 8 --seed $((SEED + i)) --timeout 19 --wait 60 >"$work/client" 2>&1 &
    client=$!
    for _ in 1 2 3 4; do
        sleep "1.$((RANDOM % 10))"
        weather
    done
    if [ $((i % 3)) = 0 ]; then
        kill -KILL "$client" "$server" 2>/dev/null
        wait "$client" "$server" 2>/dev/null
    else
        wait "$client" || status=1
        wait "$server" || status=1
    fi
    [ "$status" = 0 ] || { cat "$work/client" "$work/server"; echo "round $i"; return 1; }
}

soak() {
    local end=$((SECONDS + MINUTES * 60)) i=0 before after
    while [ $SECONDS -lt $end ]; do
        i=$((i + 1))
        round $i || return 1
        # The caches have reached their size by then.
        if [ $i = 6 ]; then before="$(slab) $(sockets) $(objects)"; fi
    done
    [ $i -gt 6 ] || { echo "only $i rounds: too short to compare"; return 1; }
    sleep 5
    after="$(slab) $(sockets) $(objects)"
    echo "$i rounds; KiB of slab, sockets, objects: $before; in the end $after"
    [ "${before#* }" = "${after#* }" ] || { echo "something is left"; return 1; }
    [ $((${after%% *} - ${before%% *})) -le "$TOLERANCE" ] || { echo "memory grows"; return 1; }
}

plan 1
note "seed $SEED, $MINUTES minutes"
up && add_links
run_case soak
down
finish
