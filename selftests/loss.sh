#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# loss.sh [ROUNDS [SECONDS]]: 64 KiB Writes with the CRC on over a 400 Mbit/s link with 100 us
# delay each way that loses packets in both directions; rdma_rxe and TCP by the same program in
# the same boot (bench.sh measures). Medians of ROUNDS (default 5) rounds of SECONDS (default
# 10). Runs on both hosts; host 2 judges two of the five losses measured (0, 0.1, 1, 5, 10 %):
#
#   at  1 % loss at least 95 % of the bandwidth without loss
#   at 10 % loss at least 70 %
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
rounds=${1:-5} seconds=${2:-10}
raw=/tmp/loss.raw
[ "$HOST" != 2 ] || plan 2
./bench.sh --rounds 0 --losses "0 0.1 1 5 10" --loss-rounds "$rounds" --loss-seconds "$seconds" --raw $raw >"/tmp/loss.$HOST" 2>&1
status=$?
[ "$HOST" = 2 ] || exit $status
note "$(cat /tmp/loss.2)"
median_of() { sed -n "s/^RESULT test=write_bw .*tag=$1 .*MiBps=\([0-9.]*\).*/\1/p" $raw.2 | median; }
clean=$(median_of on-0)
for p in 1:95 10:70; do
    loss=${p%:*} bound=${p#*:}
    rate=$(median_of "on-$loss")
    share=$(awk -v a="$rate" -v b="$clean" 'BEGIN { printf "%.1f", (b > 0) ? 100 * a / b : 0 }')
    name="loss_${loss}_percent_keeps_$bound"
    if [ "$status" = 0 ] && awk -v s="$share" -v b="$bound" 'BEGIN { exit !(s >= b) }'; then
        ok "$name # $share % of $clean MiB/s"
    else
        note "$share % of $clean MiB/s"
        not_ok "$name"
    fi
done
finish
