#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# dissector.sh: what two hosts send each other, captured and read by the Wireshark dissector.
# Runs on both hosts; host 1 captures and judges. The capture stays as /shared/dissector.pcap.
set -uo pipefail
cd "$(dirname "$0")" || exit 1
. ./lib.sh
peer=${PEERS%% *}
file=/tmp/dissector.pcap
port=4795
# A Write to a connection that does not exist, of one byte.
write=000200447aeecf3e01020304050607080501000600000007000000080000001100000022
write+=0000000100000000000000000000000000000001000000000000100000000099ff

# read_capture ARGUMENTS...: tshark, which runs no scripts for root, without anybody's settings.
read_capture() {
    setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/nonexistent \
        tshark -X "lua_script:$PWD/metaroce.lua" -r "$file" "$@" 2>/tmp/tshark.err
}

if [ "$HOST" = 1 ]; then
    tcpdump -i "$NETDEV" -U -s 0 -B 65536 -w "$file" "udp port $port" 2>/tmp/tcpdump.err &
    capture=$!
    busywait 30 grep -q listening /tmp/tcpdump.err || exit 1
    before=$(counter "$DEV" rcvd_pkts)
    barrier dissector-begin
    mroce-verify --listen 18515 >/tmp/verify.log 2>&1 &
    verify=$!
    busywait 30 eval 'ss -Hltn "sport = :18515" | grep -q .' || exit 1
    barrier dissector-listening
    wait $verify || { cat /tmp/verify.log; exit 1; }
    barrier dissector-traffic
else
    barrier dissector-begin
    barrier dissector-listening
    mroce-verify --connect "$peer" --short --seconds 1 --timeout 17 --wait 60 \
        --suites atomic_sum,invalidate,random >/tmp/verify.log 2>&1 || { cat /tmp/verify.log; exit 1; }
    barrier dissector-traffic
    # The connection ends 4 s after its last QP; then a Write for one that never was.
    sleep 6
    python3 -c 'import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.sendto(bytes.fromhex(sys.argv[3]), (sys.argv[1], int(sys.argv[2])))' "$peer" "$port" \
        "$write"
    sleep 0.5
    barrier dissector-end
    exit 0
fi
barrier dissector-end
kill -INT $capture
wait $capture
[ ! -d /shared ] || cp "$file" /shared/

all_captured() { grep -q '^0 packets dropped by kernel' /tmp/tcpdump.err; }

# What every frame is: host, types, opcodes and what was found wrong.
frames() {
    read_capture -T fields -E occurrence=a -e ip.src -e metaroce.type -e metaroce.opcode \
        -e metaroce.crc.status >/tmp/frames || { cat /tmp/tshark.err; return 1; }
    if has Lua </tmp/tshark.err; then cat /tmp/tshark.err; return 1; fi
    local frames
    frames=$(tcpdump -nr "$file" 2>/dev/null | wc -l)
    echo "$frames frames, $(cut -f2 /tmp/frames | tr ',' '\n' | wc -l) packets"
    [ "$(wc -l </tmp/frames)" = "$frames" ] && [ "$frames" -gt 500 ]
    awk -F'\t' '$2 == "" { print "frame " NR " is not shown"; bad = 1 } END { exit bad }' /tmp/frames
}

nothing_malformed() {
    local bad
    bad=$(read_capture -Y 'metaroce.malformed || metaroce.crc.bad || _ws.malformed' | head -n 5)
    [ -z "$bad" ] || { echo "$bad"; return 1; }
    # Every CRC was computed, and is right.
    [ "$(cut -f4 /tmp/frames | tr ',' '\n' | sort -u)" = 1 ]
}

# kinds COLUMN WANTED...: the values of a column are these.
kinds() {
    local seen
    seen=$(cut -f"$1" /tmp/frames | tr ',' '\n' | grep . | sort -n | uniq -c | awk '{ print $2 " (" $1 ")" }' | tr '\n' ' ')
    echo "$seen"
    [ "$(sed -E "s/ \([0-9]*\)//g; s/ $//; s/ (${3:-none})\b//g" <<<"$seen")" = "$2" ]
}
# Whether there are a Query, a Refuse and an answer to the Write for nothing is for the order in
# which both begin, and for what gets lost.
every_kind() { kinds 2 '0 1 2 3 5 8 9 10' '4|11|12'; }
every_opcode() { kinds 3 '0 1 2 3 4 5 6 7 8 9 10'; }

# The module has received as many data packets as were seen coming.
as_many_as_counted() {
    local seen counted dropped
    seen=$(awk -F'\t' -v own="$ADDR" '$1 != own { n += gsub(/(^|,)0/, "", $2) } END { print n }' /tmp/frames)
    counted=$(($(counter "$DEV" rcvd_pkts) - before))
    dropped=$(($(counter "$DEV" drop_no_conn) + $(counter "$DEV" drop_state) + $(counter "$DEV" drop_backlog)))
    echo "$seen data packets seen, $counted counted, $dropped dropped before"
    [ "$seen" -ge "$counted" ] && [ "$seen" -le $((counted + dropped)) ]
}

plan 6
for case in all_captured frames nothing_malformed every_kind every_opcode as_many_as_counted; do
    run_case $case
done
finish
