#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# speed.sh [ROUNDS [SECONDS]]: beside rdma_rxe in one boot (bench.sh measures, rounds are
# interleaved). Runs on both hosts; host 2 judges the medians of ROUNDS (default 5) rounds:
#
#   64 KiB Writes at least 2 times as fast as rxe's with the CRC on, 4 times with it off
#   half round trip of 64 B Writes not above rxe's
#
# The distance to TCP is printed.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
rounds=${1:-5} seconds=${2:-1}
raw=/tmp/speed.raw
[ "$HOST" != 2 ] || plan 3
./bench.sh --no-loss --rounds "$rounds" --seconds "$seconds" --raw $raw >"/tmp/speed.$HOST" 2>&1
status=$?
[ "$HOST" = 2 ] || exit $status
note "$(cat /tmp/speed.2)"
median_of() { sed -n "s/^RESULT test=$2 .*tag=$1 .*\<$3=\([0-9.]*\).*/\1/p" $raw.2 | median; }
# judge NAME A OPERATOR B FACTOR: passes when A OPERATOR B * FACTOR.
judge() {
    if [ "$status" = 0 ] && awk -v a="$2" -v b="$4" -v f="$5" -v o="$3" \
        'BEGIN { exit !(a > 0 && b > 0 && (o == "above" ? a >= b * f : a <= b * f)) }'; then
        ok "$1 # $2 and $4"
    else
        note "$2 and $4"
        not_ok "$1"
    fi
}
judge write_bandwidth_twice_rxe_with_crc "$(median_of on write_bw MiBps)" above "$(median_of rxe write_bw MiBps)" 2
judge write_bandwidth_four_times_rxe_without_crc "$(median_of off write_bw MiBps)" above "$(median_of rxe write_bw MiBps)" 4
judge write_latency_not_above_rxe "$(median_of on write_lat us_p50)" below "$(median_of rxe write_lat us_p50)" 1
finish
