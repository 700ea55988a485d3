#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# behaviour.sh [CASE...]: cases of behaviour that take namespaces, interfaces and queueing
# disciplines. One host (qemu-test/run --hosts 1 --no-device); makes what it needs:
#
#     namespace st1          namespace st2
#         eth0 ---- veth ------- eth0        10.99.0.1, 10.99.0.2, mtu 4200
#
# The module is loaded; devices live in their namespaces where the RDMA subsystem is in
# exclusive mode, otherwise in the first namespace with names of their own.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
PORT=4795 # UDP port of the transport

in1() { ip netns exec st1 "$@"; }
in2() { ip netns exec st2 "$@"; }
exclusive() { rdma system show | grep -q 'netns exclusive'; }

# up: both namespaces with their link; down: nothing of them is left.
up() {
    down
    ip netns add st1
    ip netns add st2
    ip link add eth0 netns st1 mtu 4200 type veth peer name eth0 netns st2
    ip -n st2 link set eth0 mtu 4200
    for i in 1 2; do
        ip -n st$i link set lo up
        ip -n st$i link set eth0 up
        ip -n st$i address add 10.99.0.$i/24 dev eth0
        [ ! -d /proc/sys/net/ipv6 ] || ip -n st$i address add fd99::$i/64 dev eth0 nodad
    done
}
down() {
    local n link
    for n in st1 st2; do
        ip netns list 2>/dev/null | grep -qw $n || continue
        ip netns pids $n | xargs -r kill -KILL 2>/dev/null || :
        for link in $(links $n); do ip netns exec $n rdma link delete "$link" 2>/dev/null || :; done
        ip netns delete $n
    done
    for link in $(rdma link | awk '$1 == "link" { sub("/.*", "", $2); print $2 }' | grep '^st'); do
        rdma link delete "$link"
    done
    ip -o link | sed -n 's/^[0-9]*: \(st[^:@]*\).*/\1/p' | xargs -r -n1 ip link delete 2>/dev/null || :
    return 0
}
links() { ip netns exec "$1" rdma link 2>/dev/null | awk '$1 == "link" { sub("/.*", "", $2); print $2 }' | grep '^st'; }

# device N: the name of the device of namespace stN. Unique in shared mode, too.
device() { echo "st${1}dev"; }
add() { ip netns exec "st$1" rdma link add "$(device "$1")" type "$KIND" netdev eth0; }
ready() { ip netns exec "st$1" ibv_devinfo -d "$(device "$1")" | grep -q PORT_ACTIVE && gid "$1" >/dev/null; }
gid() { gid_of "st$1" "$(device "$1")" "0000:0000:0000:0000:0000:ffff:0a63:000$1"; }
gid_of() {
    ip netns exec "$1" bash -c '
        for f in /sys/class/infiniband/'"$2"'/ports/1/gids/*; do
            n=${f##*/}
            [ "$(cat $f)" = "'"$3"'" ] || continue
            [ "$(cat /sys/class/infiniband/'"$2"'/ports/1/gid_attrs/types/$n 2>/dev/null)" = "RoCE v2" ] && echo $n && exit 0
        done
        exit 1'
}
both_devices() {
    add 1 && add 2 || { echo "rdma link add failed"; return 1; }
    busywait 5 ready 1
    busywait 5 ready 2
}
udp_open() { ip netns exec "$1" ss -Huan "sport = :$PORT" | grep -q .; }
udp_closed() { ! udp_open "$1"; }
no_devices() { [ -z "$(rdma link; links st1; links st2)" ]; }

# traffic SECONDS [options of mroce-verify]: a short verified run between the two namespaces.
traffic() {
    local seconds=$1 server status
    shift
    in1 mroce-verify --dev "$(device 1)" --gid "$(gid 1)" --listen 18515 >/tmp/st.server 2>&1 &
    server=$!
    in2 mroce-verify --dev "$(device 2)" --gid "$(gid 2)" --connect 10.99.0.1 --short --seconds "$seconds" --timeout 17 "$@" >/tmp/st.client 2>&1
    status=$?
    wait $server || status=1
    [ "$status" = 0 ] || { cat /tmp/st.client /tmp/st.server; return 1; }
}

# ---------------------------------------------------------------- cases

case02_link_show_against_delete() {
    up
    local stop=/tmp/st.stop i
    rm -f $stop
    (while [ ! -e $stop ]; do in1 rdma link show; in1 ibv_devinfo; in1 rdma statistic show; in1 rdma resource show; done >/dev/null 2>&1) &
    local shower=$!
    for i in $(seq 20); do
        add 1
        if [ $((i % 2)) = 0 ]; then
            in1 rdma link delete "$(device 1)"
        else
            # The interface goes, the device with it.
            ip -n st1 link delete eth0
            busywait 10 no_device_in st1
            ip link add eth0 netns st1 mtu 4200 type veth peer name eth0 netns st2
            ip -n st1 link set eth0 up
            ip -n st1 address add 10.99.0.1/24 dev eth0
        fi
    done
    touch $stop
    wait $shower || : # its last command may have met a device on its way out
    down
}
no_device_in() { [ -z "$(links "$1")" ]; }

case01_netdev_unregistered_under_traffic() {
    up
    both_devices
    in1 mroce-bench --dev "$(device 1)" --gid "$(gid 1)" --listen 18515 --wait 5 >/dev/null 2>&1 &
    local a=$!
    in2 mroce-bench --dev "$(device 2)" --gid "$(gid 2)" --connect 10.99.0.1 --tests write_bw --seconds 30 --wait 5 >/dev/null 2>&1 &
    local b=$!
    busywait 10 flowing
    ip -n st1 link delete eth0
    busywait 10 no_device_in st1
    busywait 10 no_device_in st2
    # The program that has work in flight ends by itself: its calls fail. (The other one only
    # waits for a TCP connection that nobody resets.)
    busywait 30 gone $b
    kill -KILL $a
    wait $a $b 2>/dev/null || :
    busywait 5 udp_closed st1
    down
}
gone() { ! kill -0 "$1"; }
flowing() { in2 cat /sys/class/infiniband/"$(device 2)"/ports/1/hw_counters/path0_tx_bytes | grep -qv '^0$'; }

case03_port_open_until_the_last_link() {
    up
    udp_closed st1 || { echo "the port is open before the first link"; return 1; }
    ip -n st1 link add eth1 type dummy
    ip -n st1 link set eth1 up
    in1 rdma link add st1a type "$KIND" netdev eth0
    in1 rdma link add st1b type "$KIND" netdev eth1
    udp_open st1 || { echo "the port is not open with two links"; return 1; }
    in1 rdma link delete st1a
    udp_open st1 || { echo "the port is closed although a link is left"; return 1; }
    in1 rdma link delete st1b
    busywait 5 udp_closed st1
    # The other order.
    in1 rdma link add st1a type "$KIND" netdev eth0
    in1 rdma link add st1b type "$KIND" netdev eth1
    in1 rdma link delete st1b
    udp_open st1 || { echo "the port is closed although a link is left"; return 1; }
    in1 rdma link delete st1a
    busywait 5 udp_closed st1
    down
}

case03_failed_newlink_leaves_nothing() {
    up
    refused "" in1 rdma link add st1a type "$KIND" netdev lo
    refused "" in1 rdma link add st1a type "$KIND" netdev none0
    udp_closed st1 || { echo "a refused newlink left the port open"; return 1; }
    in1 rdma link add st1a type "$KIND" netdev eth0
    ip -n st1 link add eth1 type dummy
    # The core says ENFILE to a name that is taken.
    refused "" in1 rdma link add st1a type "$KIND" netdev eth1
    udp_open st1 || { echo "a refused newlink closed the port of the good one"; return 1; }
    in1 rdma link delete st1a
    busywait 5 udp_closed st1
    # Someone else has the port: a message, no device.
    in1 mroce-bench --tests udp_lat --listen 18515 >/dev/null 2>&1 &
    local holder=$!
    in1 python3 -c "
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('0.0.0.0', $PORT))
open('/tmp/st.bound', 'w').close(); time.sleep(20)" &
    local python=$!
    busywait 10 test -e /tmp/st.bound
    refused "" in1 rdma link add st1a type "$KIND" netdev eth0
    no_device_in st1 || { echo "a device is there although the port was taken"; return 1; }
    kill $python $holder
    rm -f /tmp/st.bound
    down
}

case04_unloads_after_a_crash() {
    local round
    for round in 1 2 3; do
        up
        both_devices
        in1 mroce-bench --dev "$(device 1)" --gid "$(gid 1)" --listen 18515 >/dev/null 2>&1 &
        local a=$!
        in2 mroce-bench --dev "$(device 2)" --gid "$(gid 2)" --connect 10.99.0.1 --tests write_bw --seconds 30 >/dev/null 2>&1 &
        local b=$!
        busywait 10 flowing
        # One end crashes, then the other one, or both at once.
        kill -KILL $b
        [ $round = 2 ] || kill -KILL $a
        [ $round != 2 ] || { busywait 10 gone $b; kill -KILL $a; }
        wait $a $b 2>/dev/null || :
        in1 rdma link delete "$(device 1)"
        in2 rdma link delete "$(device 2)"
        busywait 10 unload
        ! grep -q "^$KIND " /proc/modules || { grep "^$KIND " /proc/modules; return 1; }
        modprobe "$KIND"
        down
    done
}
unload() { ! grep -q "^$KIND " /proc/modules || rmmod "$KIND"; }

case11_full_qdisc() {
    up
    both_devices
    # A queue of a few packets at a fifth of what the stack can do: most trains meet a full queue.
    tc -n st1 qdisc add dev eth0 root tbf rate 300mbit burst 20k limit 30k
    tc -n st2 qdisc add dev eth0 root tbf rate 300mbit burst 20k limit 30k
    traffic 6 --suites sizes,flag_after_data,last_byte,random --max-size 300k
    local dropped
    dropped=$(tc -n st2 -s qdisc show dev eth0 | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | head -1)
    echo "the queue refused $dropped packets"
    [ "${dropped:-0}" -gt 0 ] || { echo "the queue was never full: the test shows nothing"; return 1; }
    down
}

case18_no_ipv6() {
    [ ! -d /proc/sys/net/ipv6 ] || { echo "this boot has IPv6 (see suites.txt for one without)"; return 4; }
    up
    both_devices
    traffic 4 --suites sizes,random --max-size 100k
    down
}

case19_kinds_of_netdev() {
    up
    local kind made=0
    ip -n st1 link add st-dummy type dummy
    ip -n st1 link add st-bridge type bridge
    ip -n st1 link add link eth0 name st-macvlan type macvlan mode bridge 2>/dev/null || echo "no macvlan in this kernel"
    ip -n st1 link add link eth0 name st-vlan type vlan id 7 2>/dev/null || echo "no VLANs in this kernel"
    ip -n st1 link add st-bond type bond 2>/dev/null || echo "no bonding in this kernel"
    for kind in eth0 st-dummy st-bridge st-macvlan st-vlan st-bond; do
        ip -n st1 link show $kind >/dev/null 2>&1 || continue
        ip -n st1 link set $kind up
        in1 rdma link add st1dev type "$KIND" netdev $kind || { echo "$kind was refused"; return 1; }
        in1 rdma link | grep -q "st1dev/1 .*netdev $kind" || { echo "$kind: rdma link shows $(in1 rdma link)"; return 1; }
        in1 ibv_devinfo -d st1dev >/dev/null || { echo "$kind: ibv_devinfo fails"; return 1; }
        in1 rdma link delete st1dev
        made=$((made + 1))
    done
    echo "$made kinds of interfaces"
    # Not Ethernet: an errno and one line in the log.
    ip -n st1 tuntap add st-tun mode tun 2>/dev/null || echo "no tun in this kernel"
    for kind in lo st-tun; do
        ip -n st1 link show $kind >/dev/null 2>&1 || continue
        dmesg -c >/dev/null
        refused "" in1 rdma link add st1dev type "$KIND" netdev $kind
        [ "$(dmesg | grep -c "$KIND")" = 1 ] || { echo "$kind: $(dmesg | grep -c "$KIND") lines in the log instead of one:"; dmesg; return 1; }
    done
    down
}

# Each device has a node GUID of its own, also where netdevs share a MAC address, and the same
# one when it is made again; the version of the driver is told alike everywhere.
case19_node_guids() {
    up
    local kind mac guids again
    mac=$(in1 cat /sys/class/net/eth0/address)
    ip -n st1 link add link eth0 name st-vlan type vlan id 7 2>/dev/null || echo "no VLANs in this kernel"
    ip -n st1 link add st-dummy address "$mac" type dummy
    ip -n st1 link add st-bridge address "$mac" type bridge
    node_guids() {
        for kind in eth0 st-vlan st-dummy st-bridge; do
            ! ip -n st1 link show $kind >/dev/null 2>&1 || in1 rdma link add "st1$kind" type "$KIND" netdev $kind
        done
        in1 ibv_devinfo | awk '$1 == "hca_id:" { d = $2 } $1 == "node_guid:" && d ~ /^st1/ { print d, $2 }'
    }
    guids=$(node_guids)
    echo "$guids" | sed "s/^/netdevs with $mac: /"
    [ "$(echo "$guids" | wc -l)" -ge 3 ] || { echo "not all devices are there"; return 1; }
    [ "$(echo "$guids" | awk '{ print $2 }' | sort -u | wc -l)" = "$(echo "$guids" | wc -l)" ] || { echo "two devices share a node GUID"; return 1; }
    if [ "$KIND" = metaroce ]; then
        ! echo "$guids" | grep -v ' 024d:52' || { echo "the mark of this driver is missing"; return 1; }
    fi
    local version
    version=$(in1 ibv_devinfo -d st1eth0 | awk '$1 == "fw_ver:" { print $2 }')
    [[ $version == *.*.* && $version != 0.0.0 ]] || { echo "fw_ver is '$version'"; return 1; }
    [ "$(in1 cat /sys/class/infiniband/st1eth0/fw_ver)" = "$version" ] || { echo "fw_ver is $version, but not in sysfs"; return 1; }
    in1 rdma dev show st1eth0 | grep -q " fw $version " || { echo "fw_ver is $version, but $(in1 rdma dev show st1eth0)"; return 1; }
    for kind in $(links st1); do in1 rdma link delete "$kind"; done
    again=$(node_guids)
    [ "$again" = "$guids" ] || { echo "made again, they have other GUIDs: $again"; return 1; }
    down
}

# `rdma -dd resource show` tells of each object what the driver knows, also while objects come
# and go.
case19_resource_details() {
    [ "$KIND" = metaroce ] || { echo "details of the metaroce module"; return 4; }
    up
    both_devices
    local pid stop=/tmp/st.stop kind text
    details() { for kind in qp cq srq mr; do in2 rdma -dd resource show $kind | tr -s ' \t\n' ' '; done; }
    connected() { details | grep -q 'drv_peer .* drv_srtt_us [1-9]'; }
    ip netns exec st1 ibv_srq_pingpong -d "$(device 1)" -g "$(gid 1)" -n 10000000 >/dev/null 2>&1 &
    pid=$!
    busywait 30 listens
    ip netns exec st2 ibv_srq_pingpong -d "$(device 2)" -g "$(gid 2)" -n 10000000 10.99.0.1 >/dev/null 2>&1 &
    pid="$pid $!"
    busywait 30 connected || { echo "no connection is shown: $(details)"; return 1; }
    text=$(details)
    # shellcheck disable=SC2086
    { kill $pid; wait $pid || :; } 2>/dev/null
    for kind in 'drv_sends [0-9]+ drv_receives [0-9]+ drv_peer ::ffff:10\.99\.0\.1 drv_connection 0x[0-9a-f]+ drv_paths 16 drv_paths_good [0-9]+' \
        'drv_srtt_us [1-9][0-9]* drv_window [1-9][0-9]* drv_inflight [0-9]+ drv_retransmits [0-9]+' \
        'drv_unpolled [0-9]+ drv_overflowed 0' 'drv_posted [1-9][0-9]* drv_limit 0' 'drv_iova 0x[0-9a-f]+ drv_access 0x[1-9a-f]'; do
        echo "$text" | grep -Eq "$kind" || { echo "not shown: $kind"; echo "$text"; return 1; }
    done
    rm -f $stop
    (while [ ! -e $stop ]; do details; done >/dev/null 2>&1) &
    pid=$!
    local status=0
    traffic 2 --suites many_qps,srq_limit,rereg,cq_resize || status=$?
    touch $stop
    wait $pid
    [ $status = 0 ] || return 1
    down
}
listens() { in1 ss -Htln 'sport = :18515' | grep -q .; }

case19_autoload() {
    busywait 10 unload
    ! grep -q "^$KIND " /proc/modules || { echo "$KIND does not unload"; return 1; }
    modinfo -F alias "$KIND" | grep -q "rdma-link-$KIND" || { echo "no alias"; return 1; }
    up
    add 1 || { modprobe "$KIND"; echo "rdma link add does not load the module"; return 1; }
    busywait 5 ready 1
    in1 rdma link | grep -q "link $(device 1)/1" || { echo "the name is not the given one"; return 1; }
    down
}

case22_a_device_for_each_namespace() {
    exclusive || { echo "the RDMA subsystem is in shared mode here"; return 4; }
    up
    # The same name twice, one in each.
    in1 rdma link add stsame type "$KIND" netdev eth0
    in2 rdma link add stsame type "$KIND" netdev eth0
    [ "$(links st1)" = stsame ] && [ "$(links st2)" = stsame ] || { echo "st1: $(links st1), st2: $(links st2)"; return 1; }
    ! rdma link | grep -q stsame || { echo "the first namespace sees a device of another one"; return 1; }
    in1 ibv_devices | grep -q stsame || { echo "libibverbs does not see the device in its namespace"; return 1; }
    ! ibv_devices | grep -q stsame || { echo "libibverbs sees it in the first namespace"; return 1; }
    in1 rdma link delete stsame
    in2 rdma link delete stsame
    both_devices
    traffic 3 --suites many_qps,random
    down
}

case22_namespace_deleted_with_its_device() {
    exclusive || { echo "the RDMA subsystem is in shared mode here"; return 4; }
    local i
    for i in 1 2 3 4 5; do
        up
        both_devices
        ip netns delete st1
        ip netns delete st2
        busywait 20 none_left
    done
    none_left || { echo "left: $(rdma dev)"; return 1; }
    down
}
none_left() { ! rdma dev | grep -q "st[12]dev"; }

case22_moved_between_namespaces() {
    exclusive || { echo "the RDMA subsystem is in shared mode here"; return 4; }
    up
    add 1
    # To where its interface is not, and back.
    in1 rdma dev set "$(device 1)" netns st2 || { echo "rdma dev set netns is refused"; return 1; }
    in2 rdma dev | grep -q "$(device 1)" || { echo "the device is not in the other namespace"; return 1; }
    in2 rdma dev set "$(device 1)" netns st1
    add 2
    busywait 5 ready 1
    busywait 5 ready 2
    traffic 3 --suites many_qps,random
    down
}

case22_shared_mode() {
    ! exclusive || { echo "the RDMA subsystem is in exclusive mode here"; return 4; }
    up
    both_devices
    # Devices live in the first namespace and are seen in all.
    for n in 1 2; do
        rdma dev | grep -q "$(device $n)" || { echo "$(device $n) is not seen in the first namespace"; return 1; }
    done
    in2 rdma dev | grep -q "$(device 1)" || { echo "$(device 1) is not seen in st2"; return 1; }
    refused "" in2 rdma link add "$(device 1)" type "$KIND" netdev eth0
    traffic 3 --suites many_qps,random
    down
}

cases=(case01_netdev_unregistered_under_traffic case02_link_show_against_delete
    case03_port_open_until_the_last_link case03_failed_newlink_leaves_nothing case04_unloads_after_a_crash
    case11_full_qdisc case18_no_ipv6 case19_kinds_of_netdev case19_node_guids case19_autoload
    case22_a_device_for_each_namespace case22_namespace_deleted_with_its_device
    case22_moved_between_namespaces case22_shared_mode)
[ $# = 0 ] || cases=("$@")
trap down EXIT
plan ${#cases[@]}
for c in "${cases[@]}"; do
    run_case "$c"
    down
done
finish
