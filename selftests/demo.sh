#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# demo.sh: the main job between two hosts, for the eye: an unmodified program, verified data
# of every kind of request, perftest, and what each path carried. Runs on both hosts.
set -euo pipefail
cd "$(dirname "$0")"
. ./lib.sh
say() { [ "$HOST" != 2 ] || printf '\n== %s\n' "$*"; }
peer=${PEERS%% *}

# both SERVER CLIENT: runs SERVER on host 1 and, once it listens, CLIENT on host 2.
step=0
both() {
    step=$((step + 1))
    if [ "$HOST" = 1 ]; then
        $1 >/tmp/demo.log 2>&1 &
        local pid=$!
        busywait 30 listening || { cat /tmp/demo.log; exit 1; }
        barrier "demo-$step"
        wait $pid || { cat /tmp/demo.log; exit 1; }
    else
        barrier "demo-$step"
        $2
    fi
}
listening() { ss -Hltn 'sport = :18515' | grep -q .; }

netem=$(tc qdisc show dev "$NETDEV" root | sed -n 's/.*\(loss .*\)/\1/p')
say "$HOSTS hosts, kernel $(uname -r), $DEV on $NETDEV (mtu $(cat "/sys/class/net/$NETDEV/mtu")), network ${netem:-without loss}"
[ "$HOST" != 2 ] || ibv_devices
path_bytes "$DEV" >/tmp/paths.$HOST.before

say "an unmodified program: ibv_rc_pingpong, IPv4 and IPv6"
both "ibv_rc_pingpong -d $DEV -g $GID4" "ibv_rc_pingpong -d $DEV -g $GID4 $peer"
if [ -n "${PEERS6:-}" ]; then
    both "ibv_rc_pingpong -d $DEV -g $GID6" "ibv_rc_pingpong -d $DEV -g $GID6 $peer"
fi

say "verified data: every opcode, sizes up to 1 MiB, flags after data, random requests both ways"
both "mroce-verify --listen 18515" \
    "mroce-verify --connect $peer --short --seconds ${DEMO_SECONDS:-12} --wait 60 --timeout 17 --suites sizes,inline,flag_after_data,last_byte,atomic_sum,many_qps,random"

say "perftest: ib_write_bw"
both "ib_write_bw -d $DEV -x $GID4 -s 65536 -n 300 -F" "ib_write_bw -d $DEV -x $GID4 -s 65536 -n 300 -F $peer"

path_bytes "$DEV" >/tmp/paths.$HOST.after
say "what each path carried, as host 2 sent it"
[ "$HOST" != 2 ] || share_table /tmp/paths.$HOST.before /tmp/paths.$HOST.after
resent=$(counter "$DEV" retransmits)
[ "$HOST" != 2 ] || [ "$resent" = 0 ] || echo "$resent packets were sent again"
barrier demo-end
