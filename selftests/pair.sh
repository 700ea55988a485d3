# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
# pair.sh PREFIX NET, sourced after lib.sh: two namespaces of one host, joined by veth. They
# are called PREFIX-a and PREFIX-b, the RDMA devices that are made in them PREFIXa and PREFIXb:
#
#     PREFIX-a eth0 NET.1 ---- veth ---- eth0 NET.2 PREFIX-b       mtu 4200
pair=$1 pair_net=$2

# on a|b COMMAND: in that namespace.
on() { ip netns exec "$pair-$1" "${@:2}"; }
address() { if [ "$1" = a ]; then echo "$pair_net.1"; else echo "$pair_net.2"; fi; }
device_in() { on "$1" rdma link 2>/dev/null | has "^link $pair$1/"; }

# wire: joins the namespaces.
wire() {
    local n
    ip link add eth0 netns "$pair-a" mtu 4200 type veth peer name eth0 netns "$pair-b"
    ip -n "$pair-b" link set eth0 mtu 4200
    for n in a b; do
        ip -n "$pair-$n" address add "$(address $n)/24" dev eth0
        ip -n "$pair-$n" link set eth0 up
    done
}
# up: both namespaces anew, joined, without RDMA devices.
up() {
    local n
    down
    for n in a b; do
        ip netns add "$pair-$n"
        ip -n "$pair-$n" link set lo up
    done
    wire
}
# add_links: an RDMA device in each.
add_links() {
    local n
    for n in a b; do on $n rdma link add "$pair$n" type "$KIND" netdev eth0 || return 1; done
}
# down: kills what runs in the namespaces and takes everything away.
down() {
    local n
    for n in a b; do
        ip netns list | has -w "$pair-$n" || continue
        ip netns pids "$pair-$n" | xargs -r kill -KILL 2>/dev/null
        ! device_in $n || on $n rdma link delete "$pair$n"
        ip netns delete "$pair-$n"
    done
    return 0
}
