#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# many.sh ADDRESSES QPS [PROCESSES]: a device with so many IPv4 addresses (2 to 64), a connection
# from each to each other, and so many QPs on them (mroce-many). One host:
#
#     eth0 10.77.0.1, 10.78.0.2 … 10.78.0.ADDRESSES, one device
#
# What goes from one of them to another passes through the stack by the loopback interface.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
ADDRESSES=${1:?usage: many.sh ADDRESSES QPS [PROCESSES]} QPS=${2:?usage: many.sh ADDRESSES QPS [PROCESSES]}
PROCESSES=${3:-4}

for ((i = 2; i <= ADDRESSES; i++)); do ip address add "10.78.0.$i/32" dev "$NETDEV"; done
last() { printf '0000:0000:0000:0000:0000:ffff:0a4e:00%02x' "$ADDRESSES"; }
has_gids() { grep -qx "$(last)" "/sys/class/infiniband/$DEV/ports/1/gids/"*; }
busywait 30 has_gids || { echo "Bail out! the device has no GID $(last)"; exit 1; }
exec mroce-many --dev "$DEV" --qps "$QPS" --processes "$PROCESSES" --wait 120
