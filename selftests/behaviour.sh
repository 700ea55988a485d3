#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# behaviour.sh [CASE...]: cases of behaviour that take namespaces, interfaces and queueing
# disciplines. One host (qemu-test/run --hosts 1 --no-device); makes what it needs:
#
#     namespace st1          namespace st2
#         eth0 ---- veth ------- eth0        10.99.0.1, 10.99.0.2, fd99::1, fd99::2, mtu 4200
#
# The module is loaded; devices live in their namespaces where the RDMA subsystem is in
# exclusive mode, otherwise in the first namespace with names of their own.
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
PORT=4795 # UDP port of the transport
# What rdma says of an errno.
EINVAL='Invalid argument' EEXIST='File exists' ENFILE='Too many open files in system' EADDRINUSE='Address already in use'

# A program that is to be killed is started without these: its number has to be its own.
in1() { ip netns exec st1 "$@"; }
in2() { ip netns exec st2 "$@"; }
exclusive() { rdma system show | has 'netns exclusive'; }

# up [MTU]: both namespaces with their link; down: nothing of them is left.
up() {
    local i mtu=${1:-4200}
    down
    ip netns add st1
    ip netns add st2
    ip link add eth0 netns st1 mtu "$mtu" type veth peer name eth0 netns st2
    ip -n st2 link set eth0 mtu "$mtu"
    for i in 1 2; do
        ip -n st$i link set lo up
        ip -n st$i link set eth0 up
        ip -n st$i address add 10.99.0.$i/24 dev eth0
        [ ! -d /proc/sys/net/ipv6 ] || ip -n st$i address add fd99::$i/64 dev eth0 nodad
    done
}
down() {
    local n link
    for n in st1 st2 st3; do
        ip netns list 2>/dev/null | has -w $n || continue
        ip netns pids $n | xargs -r kill -KILL 2>/dev/null || :
        for link in $(links $n); do ip netns exec $n rdma link delete "$link" 2>/dev/null || :; done
        ip netns delete $n
    done
    for link in $(rdma link | awk '$1 == "link" { sub("/.*", "", $2); print $2 }' | grep '^st'); do
        rdma link delete "$link"
    done
    # The case about names.
    for link in stown strxe rxe9 mroce9; do ! first rdma link | has "^link $link/" || first rdma link delete $link; done
    for link in st-own st-rxe; do ! first ip link show $link >/dev/null 2>&1 || first ip link delete $link; done
    ip -o link | sed -n 's/^[0-9]*: \(st[^:@]*\).*/\1/p' | xargs -r -n1 ip link delete 2>/dev/null || :
    return 0
}
links() { ip netns exec "$1" rdma link 2>/dev/null | awk '$1 == "link" { sub("/.*", "", $2); print $2 }' | grep '^st'; }

# device N: the name of the device of namespace stN. Unique in shared mode, too.
device() { echo "st${1}dev"; }
add() { ip netns exec "st$1" rdma link add "$(device "$1")" type "$KIND" netdev "${2:-eth0}"; }
ready() { ip netns exec "st$1" ibv_devinfo -d "$(device "$1")" | has PORT_ACTIVE && gid "$1" >/dev/null; }
# gid N: the index of its IPv4 address, or of the IPv6 one with FAMILY=6.
gid() {
    local bytes=0000:0000:0000:0000:0000:ffff:0a63:000$1
    [ "${FAMILY:-4}" = 4 ] || bytes=fd99:0000:0000:0000:0000:0000:0000:000$1
    gid_of "st$1" "$(device "$1")" "$bytes"
}
both_devices() {
    add 1 "${1:-eth0}" && add 2 "${1:-eth0}" || { echo "rdma link add failed"; return 1; }
    busywait 5 ready 1
    busywait 5 ready 2
}
udp_open() { ip netns exec "$1" ss -Huan "sport = :$PORT" | has .; }
udp_closed() { ! udp_open "$1"; }
no_devices() { [ -z "$(rdma link; links st1; links st2)" ]; }

# watch N: follows the asynchronous events of a device in /tmp/st.events.N; watched N EVENT [TIMES].
watch() {
    # What an earlier case left there is not what is waited for below.
    rm -f "/tmp/st.events.$1"
    ip netns exec "st$1" stdbuf -oL ibv_asyncwatch -d "$(device "$1")" >"/tmp/st.events.$1" 2>&1 &
    disown # ended by down
    busywait 10 grep -q 'async event FD' "/tmp/st.events.$1"
}
watched() { [ "$(grep -c "$2" "/tmp/st.events.$1")" -ge "${3:-1}" ]; }

# figure N NAME: a counter of the device of namespace stN, which in shared mode the first
# namespace alone sees; more N NAME NUMBER: it is above that.
figure() {
    local where=()
    ! exclusive || where=(ip netns exec "st$1")
    "${where[@]}" cat "/sys/class/infiniband/$(device "$1")/ports/1/hw_counters/$2"
}
more() { [ "$(figure "$1" "$2")" -gt "$3" ]; }

# flow SECONDS: unverified traffic from namespace 2 to 1 in the background; pids in client and listener.
flow() {
    local before
    before=$(figure 2 path0_tx_bytes)
    ip netns exec st1 mroce-bench --dev "$(device 1)" --gid "$(gid 1)" --listen 18515 --wait 5 >/tmp/st.server 2>&1 &
    listener=$!
    ip netns exec st2 mroce-bench --dev "$(device 2)" --gid "$(gid 2)" --connect 10.99.0.1 --tests write_bw --seconds "$1" --wait 5 --timeout "${QP_TIMEOUT:-14}" >/tmp/st.client 2>&1 &
    client=$!
    busywait 10 more 2 path0_tx_bytes "$before" || { cat /tmp/st.server /tmp/st.client; return 1; }
}

# traffic SECONDS [options of mroce-verify]: a short verified run between the two namespaces.
traffic() { traffic_in_full "$@" --short; }
traffic_in_full() {
    local seconds=$1
    shift
    between mroce-verify --seconds "$seconds" --timeout "${QP_TIMEOUT:-17}" "$@"
}
# between PROGRAM [WORD...]: the program in namespace 1, and in 2 with these words.
between() {
    local program=$1 server status=0
    shift
    ip netns exec st1 "$program" --dev "$(device 1)" --gid "$(gid 1)" --listen 18515 >/tmp/st.server 2>&1 &
    server=$!
    in2 "$program" --dev "$(device 2)" --gid "$(gid 2)" --connect 10.99.0.1 "$@" >/tmp/st.client 2>&1 || status=$?
    wait $server || status=1
    [ "$status" = 0 ] || { cat /tmp/st.client /tmp/st.server; return 1; }
}

# refused_once TEXT COMMAND...: refused with that text of an errno, and with one line in the log.
refused_once() {
    local before lines
    before=$(dmesg | grep -c "$KIND")
    refused "$@" || return 1
    lines=$(($(dmesg | grep -c "$KIND") - before))
    [ $lines = 1 ] || { echo "$lines lines in the log instead of one after '${*:2}':"; dmesg | tail; return 1; }
}

# lacks WHAT: the kernel has none. Those of qemu-test have all that is asked for here; with another
# one the case is left out.
lacks() {
    echo "no $1 in this kernel"
    [ -z "${KERNEL:-}" ] || return 1
    return 4
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
    watch 1
    watch 2
    flow 30
    ip -n st1 link delete eth0
    busywait 10 no_device_in st1
    busywait 10 no_device_in st2
    # A process that holds the device hears of it.
    busywait 5 watched 1 DEVICE_FATAL || { cat /tmp/st.events.1; return 1; }
    busywait 5 watched 2 DEVICE_FATAL || { cat /tmp/st.events.2; return 1; }
    # The program that has work in flight ends by itself: its calls fail. (The other one only
    # waits for a TCP connection that nobody resets.)
    busywait 30 gone "$client"
    kill -KILL "$listener" 2>/dev/null || :
    wait "$client" "$listener" 2>/dev/null || :
    busywait 5 udp_closed st1
    busywait 5 udp_closed st2
    down
}
gone() { ! kill -0 "$1"; }

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
    refused_once "$EINVAL" in1 rdma link add st1a type "$KIND" netdev lo
    refused "" in1 rdma link add st1a type "$KIND" netdev none0
    udp_closed st1 || { echo "a refused newlink left the port open"; return 1; }
    in1 rdma link add st1a type "$KIND" netdev eth0
    ip -n st1 link add eth1 type dummy
    # The core says ENFILE to a name that is taken.
    refused_once "$ENFILE" in1 rdma link add st1a type "$KIND" netdev eth1
    refused_once "$EEXIST" in1 rdma link add st1b type "$KIND" netdev eth0
    udp_open st1 || { echo "a refused newlink closed the port of the good one"; return 1; }
    in1 rdma link delete st1a
    busywait 5 udp_closed st1
    # Someone else has the port: a message, no device.
    rm -f /tmp/st.bound
    ip netns exec st1 python3 -c "
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('0.0.0.0', $PORT))
open('/tmp/st.bound', 'w').close(); time.sleep(20)" &
    local python=$!
    busywait 10 test -e /tmp/st.bound
    refused_once "$EADDRINUSE" in1 rdma link add st1a type "$KIND" netdev eth0
    no_device_in st1 || { echo "a device is there although the port was taken"; return 1; }
    kill $python
    wait $python 2>/dev/null || :
    # Once it is free it works.
    in1 rdma link add st1a type "$KIND" netdev eth0
    rm -f /tmp/st.bound
    down
}

case04_unloads_after_a_crash() {
    local round
    for round in 1 2 3; do
        up
        both_devices
        flow 30
        # One end crashes, then the other one, or both at once.
        kill -KILL "$client"
        [ $round != 2 ] || wait "$client" 2>/dev/null || :
        # It may have noticed and ended.
        kill -KILL "$listener" 2>/dev/null || :
        wait "$client" "$listener" 2>/dev/null || :
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

# Sizes around what packets carry on links of other MTUs and over IPv6; and that they carry it.
case12_payload_of_other_links() {
    [ "$KIND" = metaroce ] || { echo "about packets of the metaroce module"; return 4; }
    local link mtu FAMILY payload
    for link in '1500 4 1392' '1500 6 1376' '4200 6 4064' '9000 4 8896' '9000 6 8864'; do
        read -r mtu FAMILY payload <<<"$link"
        up "$mtu"
        both_devices
        between mroce-behaviour case12_sizes
        echo "mtu $mtu, IPv$FAMILY: $(sed -n 's/^# \(.*in a full packet\)/\1/p; s/^ok 1 .*#/ in/p' /tmp/st.client | tr -d '\n')"
        has ", $payload bytes in a full packet" </tmp/st.client || { echo "instead of $payload"; return 1; }
        # Each offset, list of SGEs and direction on one of them: it takes the longest.
        [ "$link" != '1500 4 1392' ] || traffic 2 --suites sizes --max-size 70k
        down
    done
}

# A Send has the full length on every kernel, Write and READ in a virtual machine only.
case12_max_msg_sz() {
    [ "${KERNEL:-}" != stock ] || { echo "moves 6 GiB: minutes in a virtual machine (suite max-msg-size-stock)"; return 4; }
    up
    both_devices
    traffic_in_full 10 --suites max_msg_size --wait 60
    down
}

# A flag behind the data, and the last byte of a Write as the flag, while packets overtake one
# another and are lost.
case14_flag_never_before_the_data() {
    up
    both_devices
    local n
    for n in 1 2; do
        tc -n st$n qdisc add dev eth0 root netem delay 500us 400us loss 2% duplicate 1% limit 20000
    done
    QP_TIMEOUT=18 traffic 12 --suites flag_after_data,last_byte --wait 60
    for n in 1 2; do tc -n st$n -s qdisc show dev eth0 | sed -n 's/.*(dropped \([0-9]*\).*/'"st$n"': \1 packets were dropped/p'; done
    grep '^# [0-9]' /tmp/st.client
    down
}

# rdma_rxe and this driver in one machine, under names that speak for the other one: each is
# opened by its own plugin, without complaints.
case16_beside_another_driver() {
    modprobe rdma_rxe 2>/dev/null || { echo "no rdma_rxe in this kernel"; return 4; }
    up
    local n ours theirs
    for n in st-own st-rxe; do
        first ip link add $n type dummy
        first ip link set $n up
    done
    first rdma link add stown type "$KIND" netdev st-own
    first rdma link add strxe type rxe netdev st-rxe
    ours=$(identity stown)
    theirs=$(identity strxe)
    [ -n "$ours" ] && [ -n "$theirs" ] && [ "$ours" != "$theirs" ] || { echo "stown is '$ours', strxe '$theirs'"; return 1; }
    first rdma dev set stown name rxe9
    first rdma dev set strxe name mroce9
    [ "$(identity rxe9)" = "$ours" ] || { echo "rxe9 (before: stown) is '$(identity rxe9)' instead of '$ours'"; return 1; }
    [ "$(identity mroce9)" = "$theirs" ] || { echo "mroce9 (before: strxe) is '$(identity mroce9)' instead of '$theirs'"; return 1; }
    n=$(first ibv_devices 2>&1 >/dev/null)
    [ -z "$n" ] || { echo "libibverbs complains: $n"; return 1; }
    # Opened by the plugins that fit: objects can be made and are connected.
    # (/sys here is that of another namespace, which does not tell the MTU.)
    for n in rxe9 mroce9; do first mroce-verify --pair $n --payload-mtu 1376 --short --seconds 1 --suites many_qps || return 1; done
    for n in rxe9 mroce9; do first rdma link delete $n; done
    for n in st-own st-rxe; do first ip link delete $n; done
    rmmod rdma_rxe
    down
}
# rxe makes its devices in the first namespace; this script may run in another one.
first() { nsenter --net=/proc/1/ns/net "$@"; }
# identity DEVICE: vendor and node GUID as a program sees them; complaints of libibverbs show.
identity() { first ibv_devinfo -d "$1" 2>&1 | awk '/node_guid|vendor_id|arning|ailed/ { $1 = $1; printf "%s ", $0 }' || :; }

case18_no_ipv6() {
    [ ! -d /proc/sys/net/ipv6 ] || { echo "this boot has IPv6 (see suites.txt for one without)"; return 4; }
    up
    both_devices
    traffic 4 --suites sizes,random --max-size 100k
    down
}

# The port goes down and up, with its own interface and with the other end of the wire: each time
# one event, and the state that it tells of.
case18_port_events() {
    up
    both_devices
    watch 1
    local n times=0
    for n in 1 2; do
        times=$((times + 1))
        ip -n st$n link set eth0 down
        busywait 10 watched 1 PORT_ERR $times || { cat /tmp/st.events.1; return 1; }
        busywait 5 port_is 1 PORT_DOWN
        ip -n st$n link set eth0 up
        busywait 10 watched 1 PORT_ACTIVE $times || { cat /tmp/st.events.1; return 1; }
        busywait 5 port_is 1 PORT_ACTIVE
    done
    busywait 5 ready 2
    traffic 2 --suites many_qps
    for n in PORT_ERR PORT_ACTIVE; do
        [ "$(grep -c $n /tmp/st.events.1)" = $times ] || { echo "$n came more than $times times"; cat /tmp/st.events.1; return 1; }
    done
    ! watched 1 DEVICE_FATAL || { cat /tmp/st.events.1; return 1; }
    down
}
port_is() { ip netns exec "st$1" ibv_devinfo -d "$(device "$1")" | has "$2"; }

case19_kinds_of_netdev() {
    up
    local kind shown
    local kinds=(eth0 st-dummy st-bridge st-macvlan st-vlan st-bond st-tap)
    ip -n st1 link add st-dummy type dummy || lacks dummy
    ip -n st1 link add st-bridge type bridge || lacks bridge
    ip -n st1 link add link eth0 name st-macvlan type macvlan mode bridge || lacks macvlan
    ip -n st1 link add link eth0 name st-vlan type vlan id 7 || lacks vlan
    ip -n st1 link add st-bond type bond || lacks bond
    ip -n st1 tuntap add st-tap mode tap || lacks tap
    for kind in "${kinds[@]}"; do
        ip -n st1 link set $kind up
        in1 rdma link add st1dev type "$KIND" netdev $kind || { echo "$kind was refused"; return 1; }
        # Of a VLAN the RDMA core knows the interface below.
        shown=$kind
        [ $kind != st-vlan ] || shown=eth0
        in1 rdma link | has "st1dev/1 .*netdev $shown" || { echo "$kind: rdma link shows $(in1 rdma link)"; return 1; }
        in1 ibv_devinfo -d st1dev >/dev/null || { echo "$kind: ibv_devinfo fails"; return 1; }
        # One is there: another name does not help.
        refused_once "$EEXIST" in1 rdma link add st1more type "$KIND" netdev $kind
        in1 rdma link delete st1dev
    done
    echo "taken: ${kinds[*]}"
    # Not Ethernet: an errno and one line in the log.
    ip -n st1 tuntap add st-tun mode tun || lacks tun
    for kind in lo st-tun; do
        refused_once "$EINVAL" in1 rdma link add st1dev type "$KIND" netdev $kind
    done
    no_device_in st1
    down
}

# Each device has a node GUID of its own, also where netdevs share a MAC address, and the same
# one when it is made again; the version of the driver is told alike everywhere.
case19_node_guids() {
    up
    local kind mac guids again
    mac=$(in1 cat /sys/class/net/eth0/address)
    ip -n st1 link add link eth0 name st-vlan type vlan id 7 || lacks vlan
    ip -n st1 link add st-dummy address "$mac" type dummy
    ip -n st1 link add st-bridge address "$mac" type bridge
    node_guids() {
        for kind in eth0 st-vlan st-dummy st-bridge; do
            in1 rdma link add "st1$kind" type "$KIND" netdev $kind
        done
        in1 ibv_devinfo | awk '$1 == "hca_id:" { d = $2 } $1 == "node_guid:" && d ~ /^st1/ { print d, $2 }'
    }
    guids=$(node_guids)
    echo "$guids" | sed "s/^/netdevs with $mac: /"
    [ "$(echo "$guids" | wc -l)" = 4 ] || { echo "not all devices are there"; return 1; }
    [ "$(echo "$guids" | awk '{ print $2 }' | sort -u | wc -l)" = "$(echo "$guids" | wc -l)" ] || { echo "two devices share a node GUID"; return 1; }
    if [ "$KIND" = metaroce ]; then
        ! echo "$guids" | grep -v ' 024d:52' || { echo "the mark of this driver is missing"; return 1; }
    fi
    local version
    version=$(in1 ibv_devinfo -d st1eth0 | awk '$1 == "fw_ver:" { print $2 }')
    [[ $version == *.*.* && $version != 0.0.0 ]] || { echo "fw_ver is '$version'"; return 1; }
    [ "$(in1 cat /sys/class/infiniband/st1eth0/fw_ver)" = "$version" ] || { echo "fw_ver is $version, but not in sysfs"; return 1; }
    in1 rdma dev show st1eth0 | has " fw $version " || { echo "fw_ver is $version, but $(in1 rdma dev show st1eth0)"; return 1; }
    for kind in $(links st1); do in1 rdma link delete "$kind"; done
    again=$(node_guids)
    [ "$again" = "$guids" ] || { echo "made again, they have other GUIDs: $again"; return 1; }
    down
}

# over KIND [NETDEV]: both namespaces with an interface up0 of that kind over eth0, which has
# the address, and devices on NETDEV (up0).
over() {
    local n
    up
    for n in 1 2; do
        ip -n st$n address flush dev eth0
        case $1 in
            vlan) ip -n st$n link add link eth0 name up0 type vlan id 7 ;;
            macvlan) ip -n st$n link add link eth0 name up0 type macvlan mode bridge ;;
            bridge) ip -n st$n link add up0 type bridge && ip -n st$n link set eth0 master up0 ;;
            bond)
                ip -n st$n link add up0 type bond mode active-backup miimon 50 || { lacks bond; return; }
                [ $n != 1 ] || ip link add eth1 netns st1 mtu 4200 type veth peer name eth1 netns st2
                for slave in eth0 eth1; do
                    ip -n st$n link set $slave down
                    ip -n st$n link set $slave mtu 4200 master up0
                    ip -n st$n link set $slave up
                done
                ;;
        esac || { lacks "$1"; return; }
        ip -n st$n link set up0 mtu 4200 up
        ip -n st$n address add 10.99.0.$n/24 dev up0
    done
    both_devices "${2:-up0}"
}
traffic_over() {
    over "$1"
    traffic 3 --suites sizes,many_qps,random --max-size 300k
    down
}
case19_traffic_over_vlan() { traffic_over vlan; }
# The device of the interface below has the addresses of its VLANs as GIDs.
case19_traffic_over_vlan_of_the_netdev() {
    over vlan eth0
    traffic 3 --suites sizes,many_qps,random --max-size 300k
    down
}
case19_traffic_over_bridge() { traffic_over bridge; }
case19_traffic_over_macvlan() { traffic_over macvlan; }

# The active link of a bond goes down in mid-traffic, comes back, and the other one goes.
case19_traffic_over_bond_that_fails_over() {
    over bond
    (
        sleep 2
        ip -n st1 link set eth0 down
        sleep 2
        ip -n st1 link set eth0 up
        sleep 2
        ip -n st1 link set eth1 down
    ) &
    local cutter=$!
    QP_TIMEOUT=18 traffic 8 --suites flag_after_data --wait 60
    wait $cutter
    for n in 1 2; do
        echo "st$n: $(in$n grep -c . /proc/net/bonding/up0) lines, active: $(in$n sed -n 's/Currently Active Slave: //p' /proc/net/bonding/up0), failures: $(in$n sed -n 's/Link Failure Count: //p' /proc/net/bonding/up0 | tr '\n' ' ')"
    done
    # New connections work, too, over what is left.
    busywait 5 ready 1
    busywait 5 ready 2
    traffic 2 --suites many_qps,random
    in1 sed -n 's/Link Failure Count: //p' /proc/net/bonding/up0 | has -v '^0' || { echo "no link failed: the test shows nothing"; return 1; }
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
    connected() { details | has 'drv_peer .* drv_srtt_us [1-9]'; }
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
        'drv_srtt_us [1-9][0-9]* drv_window [1-9][0-9]* drv_inflight [0-9]+ drv_retransmits [0-9]+ drv_records [0-9]+' \
        'drv_unpolled [0-9]+ drv_overflowed 0' 'drv_posted [1-9][0-9]* drv_limit 0' 'drv_iova 0x[0-9a-f]+ drv_access 0x[1-9a-f]'; do
        echo "$text" | has -E "$kind" || { echo "not shown: $kind"; echo "$text"; return 1; }
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
listens() { in1 ss -Htln 'sport = :18515' | has .; }

case19_autoload() {
    busywait 10 unload
    ! grep -q "^$KIND " /proc/modules || { echo "$KIND does not unload"; return 1; }
    modinfo -F alias "$KIND" | has "rdma-link-$KIND" || { echo "no alias"; return 1; }
    up
    add 1 || { modprobe "$KIND"; echo "rdma link add does not load the module"; return 1; }
    busywait 5 ready 1
    in1 rdma link | has "link $(device 1)/1" || { echo "the name is not the given one"; return 1; }
    down
}

case22_a_device_for_each_namespace() {
    exclusive || { echo "the RDMA subsystem is in shared mode here"; return 4; }
    up
    # The same name twice, one in each.
    in1 rdma link add stsame type "$KIND" netdev eth0
    in2 rdma link add stsame type "$KIND" netdev eth0
    [ "$(links st1)" = stsame ] && [ "$(links st2)" = stsame ] || { echo "st1: $(links st1), st2: $(links st2)"; return 1; }
    ! rdma link | has stsame || { echo "the first namespace sees a device of another one"; return 1; }
    in1 ibv_devices | has stsame || { echo "libibverbs does not see the device in its namespace"; return 1; }
    ! ibv_devices | has stsame || { echo "libibverbs sees it in the first namespace"; return 1; }
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
none_left() { ! rdma dev | has "st[12]dev"; }

case22_moved_between_namespaces() {
    exclusive || { echo "the RDMA subsystem is in shared mode here"; return 4; }
    up
    add 1
    # To where its interface is not, and back.
    in1 rdma dev set "$(device 1)" netns st2 || { echo "rdma dev set netns is refused"; return 1; }
    in2 rdma dev | has "$(device 1)" || { echo "the device is not in the other namespace"; return 1; }
    in2 rdma dev set "$(device 1)" netns st1
    add 2
    busywait 5 ready 1
    busywait 5 ready 2
    traffic 3 --suites many_qps,random
    down
}

# The device moves away under a program with work in flight: as when it is deleted.
case22_moved_under_traffic() {
    exclusive || { echo "the RDMA subsystem is in shared mode here"; return 4; }
    up
    both_devices
    watch 2
    flow 30
    ip netns add st3
    in2 rdma dev set "$(device 2)" netns st3 || { echo "rdma dev set netns is refused"; return 1; }
    busywait 5 watched 2 DEVICE_FATAL || { cat /tmp/st.events.2; return 1; }
    busywait 30 gone "$client"
    kill -KILL "$listener" 2>/dev/null || :
    wait "$client" "$listener" 2>/dev/null || :
    ip netns exec st3 rdma dev set "$(device 2)" netns st2
    busywait 5 ready 2
    traffic 3 --suites many_qps,random
    down
}

device_gone() { ! ip netns exec "st$1" rdma dev show "$(device "$1")" >/dev/null 2>&1; }
# The interface moves away: the device goes with it, as if it had been unregistered.
case22_netdev_moved_to_another_namespace() {
    up
    both_devices
    watch 1
    flow 30
    ip -n st1 link set eth0 name moved0 netns st2
    busywait 10 device_gone 1
    busywait 5 watched 1 DEVICE_FATAL || { cat /tmp/st.events.1; return 1; }
    busywait 5 udp_closed st1
    kill -KILL "$listener" "$client" 2>/dev/null || :
    wait "$client" "$listener" 2>/dev/null || :
    # There it may have another one.
    ip -n st2 link set moved0 up
    in2 rdma link add st1again type "$KIND" netdev moved0
    in2 rdma link delete st1again
    down
}

case22_shared_mode() {
    ! exclusive || { echo "the RDMA subsystem is in exclusive mode here"; return 4; }
    up
    both_devices
    # Devices live in the first namespace and are seen in all.
    for n in 1 2; do
        rdma dev | has "$(device $n)" || { echo "$(device $n) is not seen in the first namespace"; return 1; }
    done
    in2 rdma dev | has "$(device 1)" || { echo "$(device 1) is not seen in st2"; return 1; }
    ip -n st2 link add eth1 type dummy
    refused_once "$ENFILE" in2 rdma link add "$(device 1)" type "$KIND" netdev eth1
    traffic 3 --suites many_qps,random
    down
}

mapfile -t cases < <(sed -n 's/^\(case[0-9]*_[a-z0-9_]*\)() {.*/\1/p' "$(basename "$0")")
if [ "${1:-}" = --list ]; then
    printf '%s\n' "${cases[@]}"
    exit
fi
# CASE is a name or the beginning of one.
if [ $# != 0 ]; then
    all=("${cases[@]}") cases=()
    for word in "$@"; do
        chosen=${#cases[@]}
        for c in "${all[@]}"; do [[ $c != "$word"* ]] || cases+=("$c"); done
        [ ${#cases[@]} != "$chosen" ] || { echo "behaviour.sh: no case '$word' (--list names them)" >&2; exit 2; }
    done
fi
trap down EXIT
plan ${#cases[@]}
for c in "${cases[@]}"; do
    run_case "$c"
    down
done
finish
