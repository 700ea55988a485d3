#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# replay.sh [SEED [RUNS]]: the same messages over the same faults of the network, RUNS times (default
# 2): packets that are lost, late, out of order and twice follow from SEED (default 7), ports and
# choices of the driver, too. Each counter of both devices, and the time that it took, has to be the
# same each time. One host with --kernel native-time (qemu-test/run --hosts 1 --no-device): only where
# time is virtual does nothing else have a part in it. With a folder /shared, what was counted is left in
# /shared/replay.SEED, so that several boots can be compared.
#
#     rp-a eth0 10.92.0.1 ---- veth ---- eth0 10.92.0.2 rp-b       mtu 4200
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
. ./pair.sh rp 10.92.0
SEED=${1:-7} RUNS=${2:-2}
work=$(mktemp -d)
trap 'down; rm -rf "$work"' EXIT

# weather NS SEED: what netem does to packets of the transport. Nothing else passes through it: what is
# sent when (by ARP, TCP, IPv6) would shift its random numbers.
weather() {
    tc -n "rp-$1" qdisc add dev eth0 root handle 1: prio
    tc -n "rp-$1" qdisc add dev eth0 parent 1:3 handle 30: netem loss 2% duplicate 1% delay 200us 100us limit 20000 seed "$2"
    tc -n "rp-$1" filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip protocol 17 0xff match ip dport 4795 0xffff flowid 1:3
}

gid() { gid_of "rp-$1" "rp$1" "0000:0000:0000:0000:0000:ffff:0a5c:000$([ "$1" = a ] && echo 1 || echo 2)"; }
listens() { on a ss -Htln 'sport = :18515' | has .; }

# messages: 2000 of 64 KiB there and back, by events: a program that polls would never let time pass.
messages() {
    local server status=0
    ip netns exec rp-a ibv_rc_pingpong -d rpa -g "$(gid a)" -e -c -n 2000 -s 65536 -m 4096 >"$work/server" 2>&1 &
    server=$!
    busywait 10 listens
    on b ibv_rc_pingpong -d rpb -g "$(gid b)" -e -c -n 2000 -s 65536 -m 4096 10.92.0.1 >"$work/client" 2>&1 || status=1
    wait $server || status=1
    [ $status = 0 ] || { cat "$work/server" "$work/client"; return 1; }
}

# counted: every counter of both devices, what netem did, and how long the messages took.
counted() {
    local n
    for n in a b; do
        on $n bash -c 'cd /sys/class/infiniband/rp'$n'/ports/1/hw_counters && grep -H "" *' | sed "s/^/$n /"
        tc -n rp-$n -s qdisc show dev eth0 | sed -n '/netem/,/backlog/s/^ *Sent.*(/netem /p'
    done
    grep 'bytes in' "$work/client"
}

# run N: everything anew, the module included; what was counted goes to the file N.
run() {
    modprobe -r "$KIND"
    modprobe "$KIND" seed="$SEED"
    up
    weather a "$SEED"
    weather b $((SEED + 1))
    add_links
    busywait 10 gid a
    busywait 10 gid b
    messages
    counted >"$work/$1"
    down
}

the_same_seed_the_same_counters() {
    local i
    for ((i = 1; i <= RUNS; i++)); do
        run $i
        diff "$work/1" "$work/$i" || { echo "run $i differs from the first one"; return 1; }
    done
    ! [ -d /shared ] || cp "$work/1" "/shared/replay.$SEED"
    # That there were faults at all.
    local resent
    resent=$(sed -n 's/^b retransmits:\([0-9]*\)$/\1/p' "$work/1")
    [ "${resent:-0}" -gt 100 ] || { echo "only '$resent' packets were sent again"; cat "$work/1"; return 1; }
    echo "seed $SEED: $RUNS runs alike, $resent packets sent again; $(cut -c1-200 <<<"$(tail -n 1 "$work/1")")"
}

another_seed_other_counters() {
    local first=$SEED
    run first
    SEED=$((SEED + 100))
    run other
    ! diff -q "$work/first" "$work/other" >/dev/null || { echo "seeds $first and $SEED count the same: the seed has no part in it"; return 1; }
}

plan 2
run_case the_same_seed_the_same_counters
run_case another_seed_other_counters
finish
