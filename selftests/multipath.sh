#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# multipath.sh SPINES PATHS [CASE...]: one QP over a fabric with real ECMP, and spines that are cut
# under traffic. One host (qemu-test/run --hosts 1 --no-device); makes what it needs:
#
#                        +-- mp-s1 --+
#     mp-a eth0 -- mp-l1 +-- mp-s2 --+ mp-l2 -- eth0 mp-b        mtu 4200, routed everywhere,
#     10.96.1.2          +--  ...  --+              10.96.4.2    the leaves hash over UDP ports
#
# A link of their own (10.96.9.1, 10.96.9.2) carries what the two programs tell each other by
# TCP: a connection of TCP has one path, and is not what is tested.
#
# The module is loaded anew with that many paths and SEED (default 1), which the source ports
# come from: with the same seed the leaves choose the same spines.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
usage="usage: multipath.sh SPINES PATHS [CASE...]"
SPINES=${1:?$usage} PATHS=${2:?$usage}
shift 2
: "${SEED:=1}"
: "${GAP_MAX:=2000}" # ms without progress that a cut may cost at most
work=$(mktemp -d)

on() { ip netns exec "mp-$1" "${@:2}"; }
spines() { seq 1 "$SPINES"; }

# join_ns A IF-A ADDRESS-A B IF-B ADDRESS-B: a link between two namespaces.
join_ns() {
    ip link add "$2" netns "mp-$1" mtu 4200 type veth peer name "$5" netns "mp-$4"
    ip -n "mp-$4" link set "$5" mtu 4200
    ip -n "mp-$1" address add "$3" dev "$2"
    ip -n "mp-$4" address add "$6" dev "$5"
    ip -n "mp-$1" link set "$2" up
    ip -n "mp-$4" link set "$5" up
}

up() {
    local n k to_b='' to_a=''
    down
    for n in a l1 l2 b $(spines | sed 's/^/s/'); do
        ip netns add "mp-$n"
        ip -n "mp-$n" link set lo up
    done
    join_ns a eth0 10.96.1.2/24 l1 host 10.96.1.1/24
    join_ns b eth0 10.96.4.2/24 l2 host 10.96.4.1/24
    join_ns a control 10.96.9.1/24 b control 10.96.9.2/24
    ip -n mp-a route add default via 10.96.1.1
    ip -n mp-b route add default via 10.96.4.1
    for k in $(spines); do
        join_ns l1 "up$k" "10.97.$k.1/24" "s$k" left "10.97.$k.2/24"
        join_ns l2 "up$k" "10.98.$k.1/24" "s$k" right "10.98.$k.2/24"
        on "s$k" sysctl -qw net.ipv4.ip_forward=1
        spine_routes "$k"
        to_b+=" nexthop via 10.97.$k.2 dev up$k"
        to_a+=" nexthop via 10.98.$k.2 dev up$k"
    done
    for n in l1 l2; do
        on $n sysctl -qw net.ipv4.ip_forward=1 net.ipv4.fib_multipath_hash_policy=1 \
            net.ipv4.conf.all.ignore_routes_with_linkdown=1
        for k in $(spines); do on $n sysctl -qw "net.ipv4.conf.up$k.ignore_routes_with_linkdown=1"; done
    done
    # shellcheck disable=SC2086
    ip -n mp-l1 route add 10.96.4.0/24 $to_b
    # shellcheck disable=SC2086
    ip -n mp-l2 route add 10.96.1.0/24 $to_a
    on a rdma link add mpa type "$KIND" netdev eth0
    on b rdma link add mpb type "$KIND" netdev eth0
    busywait 10 gid a mpa 0a60:0102
    busywait 10 gid b mpb 0a60:0402
    busywait 10 on a ping -c 1 -W 1 10.96.4.2
}
spine_routes() {
    ip -n "mp-s$1" route replace 10.96.4.0/24 via "10.98.$1.1"
    ip -n "mp-s$1" route replace 10.96.1.0/24 via "10.97.$1.1"
}
down() {
    local n
    for n in $(ip netns list | awk '$1 ~ /^mp-/ { print $1 }'); do
        ip netns pids "$n" | xargs -r kill -KILL 2>/dev/null
        ! ip netns exec "$n" rdma link 2>/dev/null | grep -q '^link mpa/' || ip netns exec "$n" rdma link delete mpa
        ! ip netns exec "$n" rdma link 2>/dev/null | grep -q '^link mpb/' || ip netns exec "$n" rdma link delete mpb
    done
    for n in $(ip netns list | awk '$1 ~ /^mp-/ { print $1 }'); do ip netns delete "$n"; done
    return 0
}
trap 'down; rm -rf "$work"' EXIT

# gid NS DEVICE ADDRESS-IN-HEX: index of the RoCE v2 GID of an IPv4 address.
gid() {
    gid_of "mp-$1" "$2" "0000:0000:0000:0000:0000:ffff:$3"
}

# sent LEAF: bytes that the leaf has sent to each spine, in a line.
sent() { on "$1" bash -c 'for ((k = 1; k <= '"$SPINES"'; k++)); do printf "%s " $(</sys/class/net/up$k/statistics/tx_bytes); done'; }

# Words of a line of numbers: sum_without K LINE, word K LINE.
sum_without() { awk -v k="$1" '{ for (i = 1; i <= NF; i++) if (i != k) n += $i; print n + 0 }' <<<"$2"; }
word() { awk -v k="$1" '{ print $k + 0 }' <<<"$2"; }

# others_grew K BYTES LINE, spine_grew K BYTES LINE: since LINE (of sent l1).
others_grew() { [ $(($(sum_without "$1" "$(sent l1)") - $(sum_without "$1" "$3"))) -ge "$2" ]; }
spine_grew() { [ $(($(word "$1" "$(sent l1)") - $(word "$1" "$3"))) -ge "$2" ]; }

# start PROGRAM [options of the connecting end]: both ends in the background, listener and client.
start() {
    local program=$1
    shift
    ip netns exec mp-b "$program" --dev mpb --gid "$(gid b mpb 0a60:0402)" --listen 18515 >"$work/server" 2>&1 &
    listener=$!
    ip netns exec mp-a "$program" --dev mpa --gid "$(gid a mpa 0a60:0102)" --connect 10.96.9.2 --timeout 17 "$@" >"$work/client" 2>&1 &
    client=$!
    trap after_failure EXIT
}
# In the subshell of a case that fails in between.
after_failure() {
    local status=$?
    trap - EXIT
    set +e
    [ $status = 0 ] && exit 0
    echo "what the ends had said, and their counters:"
    kill -KILL "$client" "$listener" 2>/dev/null
    wait "$client" "$listener" 2>/dev/null
    cat "$work/client" "$work/server"
    for end in a:mpa b:mpb; do
        on "${end%:*}" bash -c 'cd /sys/class/infiniband/'"${end#*:}"'/ports/1/hw_counters; echo "'"${end#*:}"':" $(grep -H . [!p]* path_* probe* | grep -v ":0$")'
    done
    for k in $(spines); do
        heal_down "$k"
        heal_silent "$k" 2>/dev/null
    done
    exit $status
}
running() { kill -0 "$client" 2>/dev/null; }
ended() { ! running; }

# reap SECONDS: both ends are through within that time, without an error.
reap() {
    local status=0
    busywait "$1" ended || { kill -KILL "$client" "$listener"; status=1; }
    wait "$client" || status=1
    wait "$listener" || status=1
    return $status
}

# A spine fails: loudly (its links are down, the leaves notice) or silently (it takes packets
# and forwards none, in either direction), and comes back.
fail_down() { ip -n "mp-s$1" link set left down && ip -n "mp-s$1" link set right down; }
heal_down() {
    ip -n "mp-s$1" link set left up
    ip -n "mp-s$1" link set right up
    spine_routes "$1"
}
fail_silent() { on "s$1" tc qdisc add dev left root netem loss 100% && on "s$1" tc qdisc add dev right root netem loss 100%; }
heal_silent() {
    on "s$1" tc qdisc delete dev left root
    on "s$1" tc qdisc delete dev right root
}

# shares LEAF BEFORE: what each spine got from the leaf since; each between half and double
# of the even share.
shares() {
    paste <(tr ' ' '\n' <<<"$2") <(sent "$1" | tr ' ' '\n') | awk -v n="$SPINES" '
        NF == 2 { k++; got[k] = $2 - $1; total += got[k] }
        END {
            for (i = 1; i <= k; i++) {
                share = total ? got[i] / total : 0
                printf "spine %d %12d bytes  %5.1f %% (even: %.1f %%)\n", i, got[i], share * 100, 100 / n
                if (share < 0.5 / n || share > 2 / n) bad = 1
            }
            if (total < 1048576) { print "too little was sent to judge"; bad = 1 }
            exit bad
        }'
}
report() { sed -n 's/^RESULT .* \(MiBps=[^ ]*\).* \(gap_ms=[^ ]*\).*/\1 \2/p' "$work/client"; }

# cut MODE: one QP writes while spine 1 fails and returns.
cut() {
    local line
    start mroce-bench --tests write_bw --seconds "${CUT_SECONDS:-8}" --warmup 0.3
    busywait 10 spine_grew 1 1000000 "$(sent l1)"
    "fail_$1" 1
    line=$(sent l1)
    # The others go on by themselves, and little is still tried over the one that failed.
    busywait 5 others_grew 1 4000000 "$line"
    line=$(sent l1)
    busywait 5 others_grew 1 8000000 "$line"
    local now lost kept
    now=$(sent l1)
    lost=$(($(word 1 "$now") - $(word 1 "$line"))) kept=$(($(sum_without 1 "$now") - $(sum_without 1 "$line")))
    echo "cut: $kept bytes over the others, $lost towards the spine that failed"
    [ $((lost * 10)) -lt $kept ] || { echo "that is more than a tenth"; return 1; }
    running || { echo "the traffic ended before the spine came back"; return 1; }
    line=$(sent l1)
    local begun=$EPOCHREALTIME
    "heal_$1" 1
    busywait 10 spine_grew 1 2000000 "$line"
    echo "back after $(((${EPOCHREALTIME/./} - ${begun/./}) / 1000)) ms"
    reap 30
    report
    local gap
    gap=$(value gap_ms <"$work/client")
    echo "longest gap without progress: $gap ms"
    awk -v g="$gap" -v m="$GAP_MAX" 'BEGIN { exit !(g != "" && g < m) }' || { echo "more than $GAP_MAX ms"; return 1; }
}

# cut_verified MODE: spines fail in turn while every byte is checked.
cut_verified() {
    local k=1 cuts=0 line
    start mroce-verify --short --seconds "${VERIFY_SECONDS:-7}" --suites random,flag_after_data --max-size 300k
    busywait 10 spine_grew 1 100000 "$(sent l1)"
    while running; do
        "fail_$1" $k
        line=$(sent l1)
        busywait 10 ended_or others_grew $k 300000 "$line"
        "heal_$1" $k
        cuts=$((cuts + 1))
        busywait 10 ended_or spine_grew $k 50000 "$line"
        k=$((k % SPINES + 1))
    done
    reap 30
    cat "$work/client"
    echo "$cuts cuts"
    [ $cuts -ge 2 ] || { echo "too few"; return 1; }
}
ended_or() { ended || "$@"; }

# ---------------------------------------------------------------- cases

ecmp_shares_of_a_writing_qp() {
    local before
    before=$(sent l1)
    start mroce-bench --tests write_bw --seconds 2 --warmup 0
    reap 30
    shares l1 "$before" || { echo "a spine has less than half or more than double of the even share"; return 1; }
    report
}
ecmp_shares_of_a_reading_qp() {
    local before
    before=$(sent l2)
    start mroce-bench --tests read_bw --seconds 2 --warmup 0
    reap 30
    shares l2 "$before" || { echo "a spine has less than half or more than double of the even share"; return 1; }
    report
}
comes_up_beside_a_dead_spine() {
    # Each of them connects anew, and half of all flows (a quarter with four spines) lead nowhere.
    local i begun
    for i in 1 2 3; do
        fail_silent $((i % SPINES + 1))
        begun=$EPOCHREALTIME
        start mroce-bench --tests write_lat --seconds 0.2 --warmup 0
        reap 15
        heal_silent $((i % SPINES + 1))
        echo "connected, exchanged and ended within $(((${EPOCHREALTIME/./} - ${begun/./}) / 1000)) ms"
    done
}
spine_goes_down() { cut down; }
spine_drops_silently() { cut silent; }
spines_go_down_data_verified() { cut_verified down; }
spines_drop_silently_data_verified() { cut_verified silent; }

cases=(ecmp_shares_of_a_writing_qp ecmp_shares_of_a_reading_qp comes_up_beside_a_dead_spine
    spine_goes_down spine_drops_silently
    spines_go_down_data_verified spines_drop_silently_data_verified)
[ $# = 0 ] || cases=("$@")
plan ${#cases[@]}
note "$SPINES spines, $PATHS paths, seed $SEED"
{ ! grep -q "^$KIND " /proc/modules || rmmod "$KIND"; } && modprobe "$KIND" paths="$PATHS" seed="$SEED" && up || { echo "Bail out! the fabric does not come up"; exit 1; }
for c in "${cases[@]}"; do run_case "$c"; done
finish
