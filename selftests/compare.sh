#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# compare.sh [ROUNDS [SCENARIO...]]: the scenarios of rust/sim/runs/module.toml with the running
# module, and whether the simulator agrees (ROUNDS: 3; the median counts). One host
# (qemu-test/run --hosts 1 --no-device); makes what it needs:
#
#     cp-1 eth0 --+             +-- cp-s1 --+
#     ...         +-- up cp-e --+           +-- cp-l -- to-r -- eth0 cp-r      mtu 4200, routed
#     cp-4 eth0 --+             +-- cp-s2 --+
#     10.95.N.2                                             10.95.40.2
#
# A queue of 200 kB stands where the rate is limited: cp-l towards cp-r (tbf 40 Mbit/s, with RED in
# the scenarios with marks), or cp-e towards the spines. A round trip of 10 ms is netem's on the way
# back (cp-l), losses are netem's in both directions, ahead of the bottleneck. Hosts take trains of
# packets apart as they leave (ethtool -K), as a network card would: queues, losses and marks are
# those of packets, as in the simulator. Sizes have what Ethernet adds to a packet on the line (stab).
# What the programs tell each other by TCP goes over links of their own (10.95.100+N).
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
rounds=${1:-3}
shift $(($# > 0))
all=(drop-tail red-ecn loss-1 loss-5 two-drop-tail two-red-ecn incast-4 spines-40-20 incast-4-hint)
scenarios=("${all[@]}")
[ $# = 0 ] || scenarios=("$@")
: "${SECONDS_WARM:=5}" "${SECONDS_MEASURED:=10}"
work=$(mktemp -d)
table=$work/measured.csv
columns=mbit_s,jain,window_kb,inflight_kb,srtt_us,share_mbit,resent_part,spurious_part,marked_part,cuts_s,faulty_part
echo "scenario,$columns" >"$table"

RATE=40mbit BURST=30000 LIMIT=200000 DELAY=10ms
# Averages the queue with a weight of a half: follows it closely.
RED="red limit $LIMIT min 40000 max 120000 avpkt 4238 burst 10 probability 0.1 bandwidth 40mbit ecn"
# To what tc counts (the Ethernet header included): FCS, preamble, gap.
LINE="stab overhead 24 linklayer ethernet"

on() { ip netns exec "cp-$1" "${@:2}"; }

# wire A IF-A ADDRESS-A B IF-B ADDRESS-B: a link between two namespaces.
wire() {
    ip link add "$2" netns "cp-$1" mtu 4200 type veth peer name "$5" netns "cp-$4"
    ip -n "cp-$4" link set "$5" mtu 4200
    ends "$@"
    on "$1" ethtool -K "$2" tx-gso-list off tx-udp-segmentation off gro off
    on "$4" ethtool -K "$5" tx-gso-list off tx-udp-segmentation off gro off
}
ends() {
    ip -n "cp-$1" address add "$3" dev "$2"
    ip -n "cp-$4" address add "$6" dev "$5"
    ip -n "cp-$1" link set "$2" up
    ip -n "cp-$4" link set "$5" up
}

# up veth|tap: namespaces and links; the last one, to cp-r, is of that kind. They stay for the next
# scenario of that kind, without what it has done to them.
up() {
    local n k
    if [ "$(cat "$work/kind" 2>/dev/null)" = "$1" ]; then
        for n in 1 2 3 4 r; do on "$n" rdma link delete "cp$n"; done
        for k in "l to-r" "l up1" "l up2" "e up1" "e up2"; do
            on "${k% *}" tc qdisc delete dev "${k#* }" root 2>/dev/null || :
        done
        spread 1
        devices
        return
    fi
    down
    for n in 1 2 3 4 e s1 s2 l r; do
        ip netns add "cp-$n"
        ip -n "cp-$n" link set lo up
        on "$n" sysctl -qw net.ipv4.ip_forward=1 net.ipv4.fib_multipath_hash_policy=1
    done
    for n in 1 2 3 4; do
        wire "$n" eth0 "10.95.$n.2/24" e "host$n" "10.95.$n.1/24"
        wire "$n" control "10.95.10$n.1/24" r "control$n" "10.95.10$n.2/24"
        ip -n "cp-$n" route add default via "10.95.$n.1"
    done
    for k in 1 2; do
        wire e "up$k" "10.95.2$k.1/24" "s$k" left "10.95.2$k.2/24"
        wire l "up$k" "10.95.3$k.1/24" "s$k" right "10.95.3$k.2/24"
        ip -n "cp-s$k" route add 10.95.40.0/24 via "10.95.3$k.1"
        for n in 1 2 3 4; do ip -n "cp-s$k" route add "10.95.$n.0/24" via "10.95.2$k.1"; done
    done
    if [ "$1" = veth ]; then
        wire l to-r 10.95.40.1/24 r eth0 10.95.40.2/24
    else
        # In a namespace that is there: what is in it is killed at the end.
        ip netns exec cp-r mroce-tap cp-l/line cp-r/line >"$work/tap" 2>&1 &
        busywait 10 grep -qx up "$work/tap" || { cat "$work/tap"; return 1; }
        for n in l:to-r r:eth0; do
            ip -n "cp-${n%:*}" link set line up mtu 4204
            ip -n "cp-${n%:*}" link add link line name "${n#*:}" mtu 4200 type vlan id 2
        done
        # The rate that the receiver divides among those that send: it believes that of a VLAN.
        on r ethtool -s line speed 40 duplex full
        ends l to-r 10.95.40.1/24 r eth0 10.95.40.2/24
    fi
    ip -n cp-r route add default via 10.95.40.1
    spread 1
    devices
    echo "$1" >"$work/kind"
}
# devices: new ones, which know nothing of the way.
devices() {
    local n
    for n in 1 2 3 4 r; do on "$n" rdma link add "cp$n" type "$KIND" netdev eth0; done
    for n in 1 2 3 4 r; do busywait 10 gid "$n"; done
    for n in 1 2 3 4; do busywait 10 on "$n" ping -c 1 -W 1 10.95.40.2; done
}
# spread SPINES: the routes of both leaves lead over so many.
spread() {
    local n k to_r='' to_hosts=''
    for k in $(seq 1 "$1"); do
        to_r+=" nexthop via 10.95.2$k.2 dev up$k"
        to_hosts+=" nexthop via 10.95.3$k.2 dev up$k"
    done
    # shellcheck disable=SC2086
    ip -n cp-e route replace 10.95.40.0/24 $to_r
    # shellcheck disable=SC2086
    for n in 1 2 3 4; do ip -n cp-l route replace "10.95.$n.0/24" $to_hosts; done
}
down() {
    local n
    rm -f "$work/kind"
    for n in $(spaces); do
        ip netns pids "cp-$n" | xargs -r kill -KILL 2>/dev/null
        on "$n" rdma link 2>/dev/null | sed -n 's,^link \([^/]*\)/.*,\1,p' | while read -r l; do on "$n" rdma link delete "$l"; done
    done
    for n in $(spaces); do ip netns delete "cp-$n"; done
    return 0
}
spaces() { ip netns list | sed -n 's/^cp-\([^ ]*\).*/\1/p'; }
trap 'down; rm -rf "$work"' EXIT

# gid NS: index of the RoCE v2 GID of its address.
gid() {
    local address=0a5f:0${1}02
    [ "$1" != r ] || address=0a5f:2802
    gid_of "cp-$1" "cp$1" "0000:0000:0000:0000:0000:ffff:$address"
}

# A line of 200 Mbit/s; what tbf holds stands in its own queue, or in RED's.
bottleneck() {
    # shellcheck disable=SC2086
    on l tc qdisc replace dev to-r root handle 1: $LINE tbf rate $RATE burst $BURST limit $LIMIT
}
red() {
    bottleneck
    # shellcheck disable=SC2086
    on l tc qdisc add dev to-r parent 1:1 handle 10: $RED
}
# way [NETEM-ARGUMENTS]: the way back takes its time; both directions are as the arguments say.
way() {
    local k
    for k in 1 2; do on l tc qdisc replace dev "up$k" root netem limit 100000 delay $DELAY "$@"; done
    [ $# = 0 ] || on e tc qdisc replace dev up1 root netem limit 100000 "$@"
}

# bytes NS: what its links to the two spines have sent.
bytes() { on "$1" bash -c 'echo $(</sys/class/net/up1/statistics/tx_bytes) $(</sys/class/net/up2/statistics/tx_bytes)'; }

# traffic SCENARIO SENDERS: 64 KiB Writes, 16 outstanding, of so many hosts to cp-r; a row of the table.
traffic() {
    local n status=0 before
    local -a listeners=() clients=()
    before="$(bytes e) $(bytes l)"
    for n in $(seq 1 "$2"); do
        ip netns exec cp-r mroce-bench --dev cpr --gid "$(gid r)" --listen "1850$n" >"$work/server$n" 2>&1 &
        listeners+=($!)
    done
    for n in $(seq 1 "$2"); do
        ip netns exec "cp-$n" mroce-bench --dev "cp$n" --gid "$(gid "$n")" --connect "10.95.10$n.2:1850$n" --timeout 17 \
            --tests write_bw:64k:16 --warmup "$SECONDS_WARM" --seconds "$SECONDS_MEASURED" --telemetry 5 >"$work/client$n" 2>&1 &
        clients+=($!)
    done
    for n in "${clients[@]}" "${listeners[@]}"; do wait "$n" || status=1; done
    if [ $status != 0 ]; then
        for n in $(seq 1 "$2"); do cat "$work/client$n" "$work/server$n"; done
        return 1
    fi
    on l tc -s qdisc show dev to-r
    for n in $(seq 1 "$2"); do cat "$work/client$n"; done >"$work/results"
    cat "$work/results"
    awk -v scenario="$1" -v before="$before" -v after="$(bytes e) $(bytes l)" '
        $1 == "RESULT" {
            for (i = 2; i <= NF; i++) { split($i, kv, "="); v[kv[1]] = kv[2] }
            n++
            rate += v["Mbps"]; squares += v["Mbps"] ^ 2
            window += v["window_kb"]; inflight += v["inflight_kb"]; srtt += v["srtt_us"]; share += v["share_mbit"]
            sent += v["sent"] + v["resent"]; resent += v["resent"]; spurious += v["spurious"]; marked += v["marked"]
            cuts += v["cuts"] / v["seconds"]
        }
        END {
            if (!n || !sent) exit 1
            split(before, b); split(after, a)
            spines = a[1] + a[2] + a[3] + a[4] - b[1] - b[2] - b[3] - b[4]
            printf "%s,%.1f,%.4f,%.1f,%.1f,%.0f,%.1f,%.5f,%.5f,%.5f,%.1f,%.4f\n", scenario, rate, rate ^ 2 / (n * squares),
                window / n, inflight / n, srtt / n, share / n, resent / sent, spurious / sent, marked / sent, cuts,
                (a[2] + a[4] - b[2] - b[4]) / spines
        }' "$work/results" >"$work/row" || { echo "no result"; return 1; }
    cat "$work/row"
    cat "$work/row" >>"$table"
}

measure() {
    local round
    for round in $(seq 1 "$rounds"); do
        case $scenario in *-hint) up tap ;; *) up veth ;; esac
        way
        case $scenario in
            drop-tail)
                bottleneck
                traffic "$scenario" 1
                ;;
            red-ecn)
                red
                traffic "$scenario" 1
                ;;
            loss-*)
                bottleneck
                way loss "${scenario#loss-}%"
                traffic "$scenario" 1
                ;;
            two-drop-tail)
                bottleneck
                traffic "$scenario" 2
                ;;
            two-red-ecn)
                red
                traffic "$scenario" 2
                ;;
            incast-4*)
                bottleneck
                traffic "$scenario" 4
                ;;
            spines-40-20)
                spread 2
                # shellcheck disable=SC2086
                on e tc qdisc replace dev up1 root handle 1: $LINE tbf rate 40mbit burst $BURST limit $LIMIT
                # shellcheck disable=SC2086
                on e tc qdisc replace dev up2 root handle 1: $LINE tbf rate 20mbit burst $BURST limit $LIMIT
                traffic "$scenario" 1
                ;;
            *) echo "there is no scenario $scenario"; return 1 ;;
        esac
    done
}

simulator_agrees() {
    metaroce-sim --quiet --out "$work/sim" --against "$table" ../rust/sim/runs/module.toml
}

whole=0
[ "${scenarios[*]}" != "${all[*]}" ] || whole=1
plan $((${#scenarios[@]} + whole))
{ ! grep -q "^$KIND " /proc/modules || rmmod "$KIND"; } && modprobe "$KIND" paths=8 || { echo "Bail out! the module cannot be loaded"; exit 1; }
for scenario in "${scenarios[@]}"; do
    eval "measured_${scenario//-/_}() { measure; }"
    run_case "measured_${scenario//-/_}"
done
note "$(cat "$table")"
[ ! -d /shared ] || cp "$table" /shared/measured.csv
# Part of the scenarios is for the eye.
[ $whole = 0 ] || run_case simulator_agrees
finish
