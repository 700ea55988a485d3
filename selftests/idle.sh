#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# idle.sh: a connection that nobody uses is closed by both ends after half a minute and gives back
# its send records, and the next request opens it again; the program does not notice. Runs on both hosts; host 2 reports. The
# program that sends is stopped meanwhile.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
PORT=4795 # UDP port of the transport
CLOSE=5   # type of its packets that close
peer=${PEERS%% *}

if [ "$HOST" = 1 ]; then
    exec mroce-bench --dev "$DEV" --gid "$GID4" --listen 18515 --wait 200
fi

sending() { path_bytes "$DEV" | awk '{ n += $2 } END { exit !(n > 1000000) }'; }
# Send records of a path, as many as the busiest connection has.
records() { rdma -dd resource show qp | tr -s ' \t\n' ' ' | grep -o 'drv_records [0-9]*' | sort -nrk2 | sed -n '1s/.* //p'; }
at_rest() { [ "$(records)" = 16 ]; }
ended() { ! kill -0 "$1" 2>/dev/null; }
closes_and_opens_again() {
    local client watcher before
    rm -f /tmp/idle.*
    mroce-bench --dev "$DEV" --gid "$GID4" --connect "$peer" --tests write_bw --warmup 5 --seconds 2 --wait 200 >/tmp/idle.client 2>&1 &
    client=$!
    busywait 60 sending || { cat /tmp/idle.client; return 1; }
    note "$(records) send records of each path"
    kill -STOP $client
    tcpdump -nn -i "$NETDEV" -c 2 "udp port $PORT and udp[8] = $CLOSE" >/tmp/idle.dump 2>/tmp/idle.dump.err &
    watcher=$!
    before=$(counter "$DEV" handshakes)
    # A request and the answer.
    busywait 120 ended $watcher || { cat /tmp/idle.dump; kill -KILL $client $watcher; return 1; }
    [ "$(counter "$DEV" handshakes)" = "$before" ] || { echo "a handshake while nobody sends"; return 1; }
    busywait 30 at_rest || { echo "$(records) send records are left"; return 1; }
    kill -CONT $client
    wait $client || { cat /tmp/idle.client; return 1; }
    [ "$(counter "$DEV" handshakes)" -gt "$before" ] || { echo "it went on without a handshake"; return 1; }
    [ "$(counter "$DEV" conn_errors)" = 0 ] || { echo "connections failed"; return 1; }
    grep RESULT /tmp/idle.client
}

plan 1
run_case closes_and_opens_again
finish
