#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# soak.sh [MINUTES]: verified traffic for that long (default 30) while the network changes at
# random and programs are killed; then what the kernel holds (slab, sockets, timers, objects) is
# compared with what it held once its caches had grown. A QP that cannot be connected because an
# interface is down, or has a small MTU, is tried again; wrong bytes, failed requests and
# leftovers are failures. One host (qemu-test/run --hosts 1 --no-device); makes two namespaces:
#
#     so-a eth0 10.93.0.1 ---- veth ---- eth0 10.93.0.2 so-b       mtu 4200
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
. ./pair.sh so 10.93.0
MINUTES=${1:-30}
WARMUP=6                       # rounds
: "${SEED:=$((EPOCHSECONDS % 30000))}"
: "${TOLERANCE:=$(slab_tolerance)}" # KiB by which unreclaimable slab may grow
work=$(mktemp -d)
trap 'down; rm -rf "$work"' EXIT

# weather: the network becomes another one.
weather() {
    local n=a what=$((RANDOM % 9)) side=$((RANDOM % 2)) m
    [ $side = 0 ] || n=b
    tc -n so-$n qdisc delete dev eth0 root 2>/dev/null
    refuse_packets 0
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
        8) refuse_packets 5 ;; # where the kernel can
    esac
}

# slab: KiB that cannot be reclaimed; the share of each cache goes to the file SLAB.
slab() {
    local f
    sync
    echo 3 >/proc/sys/vm/drop_caches
    # Also what KASAN keeps back.
    for f in /sys/kernel/slab/*/shrink; do echo 1 2>/dev/null >"$f"; done
    sleep 1
    awk 'NR > 2 { print $1, $3 * $4 / 1024 }' /proc/slabinfo | sort >"$1"
    awk '$1 == "SUnreclaim:" { print $2 }' /proc/meminfo
}
sockets() { for n in a b; do on $n ss -Huan; done | wc -l; }
timers() { grep -c "\\[$KIND\\]" /proc/timer_list; }
objects() { for n in a b; do on $n rdma resource show "so$n" | sed 's/.*: //'; done | tr '\n' ' '; }
held() { echo "$(sockets) sockets, $(timers) timers, $(objects)"; }
# What it held in the beginning, before any program.
as_in_the_beginning() { [ "$(held)" = "$(cat "$work/held")" ]; }

# A round: traffic, of which every third ends by a kill, under changing weather.
round() {
    local i=$1 server client status=0
    ip netns exec so-a mroce-verify --dev soa --listen 18515 --wait 60 --patience 30 >"$work/server" 2>&1 &
    server=$!
    ip netns exec so-b mroce-verify --dev sob --connect 10.93.0.1 --suites random,many_qps,atomic_sum \
        --short --seconds 8 --seed $((SEED + i)) --timeout 19 --wait 60 --patience 30 >"$work/client" 2>&1 &
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
    local end=$((SECONDS + MINUTES * 60)) i=0 before after n
    # Here: a shell begins its random numbers anew.
    RANDOM=$SEED
    held >"$work/held"
    while [ $SECONDS -lt $end ]; do
        i=$((i + 1))
        round $i || return 1
        [ $i != "$WARMUP" ] || before=$(slab "$work/before")
    done
    [ $i -gt "$WARMUP" ] || { echo "only $i rounds: too short to compare"; return 1; }
    for n in a b; do tc -n so-$n qdisc delete dev eth0 root 2>/dev/null; done
    refuse_packets 0 || :
    busywait 20 as_in_the_beginning || { echo "left: $(held), in the beginning: $(cat "$work/held")"; return 1; }
    after=$(slab "$work/after")
    echo "$i rounds; $(held); KiB of slab: $before after $WARMUP rounds, $after in the end"
    [ $((after - before)) -le "$TOLERANCE" ] || {
        echo "memory grows, KiB:"
        join "$work/before" "$work/after" | awk '$3 - $2 > 64 { print $3 - $2, $1 }' | sort -rn | head
        return 1
    }
}

plan 1
note "seed $SEED, $MINUTES minutes"
up && add_links
run_case soak
down
finish
