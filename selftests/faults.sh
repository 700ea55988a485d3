#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# faults.sh [CASE...]: loading the module, making and deleting a link and changing its planes while
# one allocation after the other fails in the kernel, and traffic while the network below it fails in every way. One
# host (qemu-test/run --hosts 1 --no-device), on a kernel with fault injection for case06; makes
# what it needs:
#
#     fi-a eth0 10.94.0.1 ---- veth ---- eth0 10.94.0.2 fi-b       mtu 4200
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
. ./pair.sh 'fi' 10.94.0
: "${MOST:=2000}" # faults that are tried at the most
work=$(mktemp -d)
trap 'down; rm -rf "$work"' EXIT

injects() {
    [ -e /proc/self/fail-nth ] || { echo "this kernel injects no faults"; return 4; }
    mount -t debugfs none /sys/kernel/debug 2>/dev/null || :
    echo N >/sys/kernel/debug/failslab/ignore-gfp-wait
    echo N >/sys/kernel/debug/fail_page_alloc/ignore-gfp-wait
    echo 0 >/sys/kernel/debug/fail_page_alloc/min-order
    for k in failslab fail_page_alloc fail_usercopy; do echo 0 >/sys/kernel/debug/$k/verbose; done
}

# walk WHAT...: python3 that calls act() with the n-th fault, n = 1, 2, …, undo() after each
# that worked, until a call meets fewer faults than n. What act() needs is made by prepare().
walk() {
    MOST=$MOST python3 - "$@" <<'PY'
import ctypes, os, re, socket, struct, subprocess, sys
what, most = sys.argv[1], int(os.environ["MOST"])
nth = os.open("/proc/thread-self/fail-nth", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)

def prepare():
    pass
def attribute(number, value):
    pad = -len(value) % 4
    return struct.pack("=HH", len(value) + 4, number) + value + b"\0" * pad
# ask COMMAND ATTRIBUTES: a request to nldev, with acknowledgement; its errno.
def ask(command, body):
    try:
        netlink.send(struct.pack("=IHHII", 16 + len(body), 5 << 10 | command, 5, 1, 0) + body)
        answer = netlink.recv(4096)
    except OSError as e:
        return e.errno
    return -struct.unpack_from("=i", answer, 16)[0]
if what != "module":
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20)
    netlink.bind((0, 0))

if what == "module":
    file = os.open(sys.argv[2], os.O_RDONLY)
    parameters = ctypes.create_string_buffer(b"")
    def act():
        return ctypes.get_errno() if libc.syscall(313, file, parameters, 0) else 0
    def undo():
        subprocess.run(["rmmod", sys.argv[3]], check=True)
elif what == "unlink":
    # Beside another device; DELLINK of nldev, with the number of the device.
    def prepare():
        global index
        subprocess.run(["ip", "link", "add", "eth8", "type", "dummy"], check=True)
        subprocess.run(["rdma", "link", "add", "fi8", "type", sys.argv[2], "netdev", "eth8"], check=True)
        shown = subprocess.run(["rdma", "dev", "show", "fi8"], check=True, capture_output=True, text=True).stdout
        index = int(re.match(r"(\d+): fi8:", shown)[1])
    def act():
        return ask(4, attribute(1, struct.pack("=I", index)))
    def undo():
        # When it was not deleted. Then nothing of it is left that its netdev would wait for.
        subprocess.run(["rdma", "link", "delete", "fi8"], check=False, stderr=subprocess.DEVNULL)
        try:
            # Which nobody can kill while it waits.
            subprocess.Popen(["ip", "link", "delete", "eth8"]).wait(60)
        except subprocess.TimeoutExpired:
            sys.exit(f"fault {n}: the netdev of the deleted link does not go")
elif what == "planes":
    # The life of plane eth8 of the device fia, by its files.
    files = "/sys/class/infiniband/fia/planes/"
    def write(name):
        with open(files + name, "wb", buffering=0) as file:
            file.write(b"eth8")
    def act():
        global done
        done = None
        for step in "add", "drain", "resume", "del":
            try:
                write(step)
            except OSError as e:
                return e.errno
            done = step
        return 0
    def undo():
        # A call that failed has changed nothing.
        with open(files + "list", "rb") as file:
            shown = file.read()
        there, draining = b" eth8 " in shown, b" eth8 draining" in shown
        if there != (done not in (None, "del")) or draining != (done == "drain"):
            sys.exit(f"fault {n}: what worked last is '{done}', but the list is {shown}")
        if there:
            write("del")
else:
    # NEWLINK of nldev: name, type and netdev of the device.
    body = b"".join(attribute(number, value + b"\0") for number, value in
        ((2, b"fia"), (int(sys.argv[3]), sys.argv[2].encode()), (int(sys.argv[4]), b"eth0")))
    def act():
        return ask(3, body)
    def undo():
        # When the answer was what failed, the link may be there all the same.
        subprocess.run(["rdma", "link", "delete", "fia"], check=False, stderr=subprocess.DEVNULL)

# met(): whether the fault has been met. Reading that is a copy to a user, too: when the next copy is
# the one that fails, nothing has failed before.
def met():
    try:
        return os.pread(nth, 16, 0).strip() == b"0"
    except OSError:
        return False

failed = survived = 0
for n in range(1, most + 1):
    prepare()
    os.pwrite(nth, str(n).encode(), 0)
    error = act()
    injected = met()
    os.pwrite(nth, b"0", 0)
    if not error or what != "module":
        undo()
    if not injected:
        if error:
            sys.exit(f"fault {n} was not injected, but the call fails: {os.strerror(error)}")
        print(f"{n - 1} faults: {failed} calls failed, {survived} worked all the same")
        break
    if error:
        failed += 1
    else:
        survived += 1
    if n % 16 == 0:
        prepare()
        error = act()
        if error:
            sys.exit(f"after fault {n}, without one: {os.strerror(error)}")
        undo()
else:
    print(f"{most} faults and no end: {failed} calls failed, {survived} worked all the same")
PY
}

# ---------------------------------------------------------------- cases

case06_module_load() {
    injects
    ! grep -q "^$KIND " /proc/modules || rmmod "$KIND"
    walk module "$(modinfo -n "$KIND")" "$KIND"
    modprobe "$KIND"
}

case06_link_add() {
    injects
    modprobe "$KIND"
    up
    export -f walk
    export MOST
    # LINK_TYPE and NDEV_NAME of rdma_netlink.h.
    on a bash -c "walk link $KIND 65 51"
    on a rdma link add fia type "$KIND" netdev eth0
    on a rdma link delete fia
    down
}

# Beside a link that stays. What is deleted is gone with its references to the netdev.
case06_link_delete() {
    injects
    modprobe "$KIND"
    up
    export -f walk
    export MOST
    on a rdma link add fia type "$KIND" netdev eth0
    on a bash -c "walk unlink $KIND"
    on a rdma link delete fia
    down
}

# A netdev becomes a plane, and what else there is to be done with it.
case06_planes() {
    injects
    modprobe "$KIND"
    up
    ip -n fi-a link add eth8 type dummy
    ip -n fi-a address add 10.94.8.1/24 dev eth8
    ip -n fi-a link set eth8 up
    export -f walk
    export MOST
    on a rdma link add fia type "$KIND" netdev eth0
    on a bash -c "walk planes"
    ip -n fi-a link delete eth8
    on a rdma link delete fia
    down
}

sent() { on b cat /sys/class/infiniband/fib/ports/1/hw_counters/sent_pkts; }
moving() { [ "$(sent)" -gt $((begun + 100)) ]; }
# verified SECONDS: checked traffic in the background; pids in client and server.
verified() {
    begun=$(sent)
    ip netns exec fi-a mroce-verify --dev fia --listen 18515 --wait 60 --patience 30 >"$work/server" 2>&1 &
    server=$!
    ip netns exec fi-b mroce-verify --dev fib --connect 10.94.0.1 --suites random --seconds "$1" --timeout 19 --wait 60 --patience 30 >"$work/client" 2>&1 &
    client=$!
    busywait 90 moving || { cat "$work/client" "$work/server"; return 1; }
}
# The same without checked bytes, over one connection: verify makes new ones, and asks for an MTU.
plain() {
    begun=$(sent)
    ip netns exec fi-a mroce-bench --dev fia --listen 18515 --timeout 19 --wait 60 >"$work/server" 2>&1 &
    server=$!
    ip netns exec fi-b mroce-bench --dev fib --connect 10.94.0.1 --tests write_bw --seconds "$1" --timeout 19 --wait 60 >"$work/client" 2>&1 &
    client=$!
    busywait 90 moving || { cat "$work/client" "$work/server"; return 1; }
}
ended_well() {
    local status=0
    wait "$client" || status=1
    wait "$server" || status=1
    [ "$status" = 0 ] || { cat "$work/client" "$work/server"; return 1; }
}

cpu1=/sys/devices/system/cpu/cpu1/online
# The network, the clock or a CPU fails and comes back under traffic: no request fails, no byte
# is wrong.
net_fails_and_comes_back() {
    modprobe "$KIND"
    up
    add_links
    local how n
    for how in carrier full stopped route mtu address clock memory cpu; do
        if [ $how = memory ] && ! injects >/dev/null; then
            echo "memory: this kernel injects no faults"
            continue
        fi
        if [ $how = cpu ] && [ ! -w $cpu1 ]; then
            echo "cpu: this kernel has none to spare"
            continue
        fi
        if [ $how = mtu ]; then plain 4; else verified 4; fi
        case $how in
            carrier)
                ip -n fi-a link set eth0 down
                sleep 0.3
                ip -n fi-a link set eth0 up
                ;;
            full)
                tc -n fi-b qdisc add dev eth0 root tbf rate 8kbit burst 5000 limit 5000
                sleep 0.5
                tc -n fi-b qdisc delete dev eth0 root
                ;;
            stopped)
                # All that is sent waits, and leaves together in the end.
                tc -n fi-b qdisc add dev eth0 root tbf rate 8bit burst 5000 limit 100m
                sleep 0.5
                tc -n fi-b qdisc change dev eth0 root tbf rate 10gbit burst 1m limit 100m
                sleep 0.2
                tc -n fi-b qdisc delete dev eth0 root
                ;;
            route)
                ip -n fi-b route delete 10.94.0.0/24
                sleep 0.5
                ip -n fi-b route add 10.94.0.0/24 dev eth0 src 10.94.0.2
                ;;
            mtu)
                for n in a b; do ip -n fi-$n link set eth0 mtu 1500; done
                sleep 1
                for n in a b; do ip -n fi-$n link set eth0 mtu 4200; done
                ;;
            address)
                ip -n fi-b address add 10.94.0.77/24 dev eth0
                ip -n fi-b address delete 10.94.0.77/24 dev eth0
                # Its own, for which QPs hold the GID.
                ip -n fi-b address delete 10.94.0.2/24 dev eth0
                sleep 0.3
                ip -n fi-b address add 10.94.0.2/24 dev eth0
                ;;
            memory)
                refuse_packets 10
                sleep 1
                refuse_packets 0
                n=$(refused_packets)
                [ "$n" -gt 100 ] || { echo "memory: only $n packets were refused: nothing was tested"; return 1; }
                echo "memory: $n packets were refused"
                ;;
            clock)
                date -s '+1 hour' >/dev/null
                sleep 0.3
                date -s '-1 hour' >/dev/null
                ;;
            cpu)
                # With the work items and timers that it has.
                for n in 0 1 0 1; do
                    echo $n >$cpu1
                    sleep 0.5
                done
                ;;
        esac
        ended_well || { echo "after: $how"; return 1; }
        echo "$how: traffic went on"
    done
    down
}

# What does not come back: requests end with an error, programs end, nothing is left.
net_gone_for_good() {
    local how
    modprobe "$KIND"
    for how in address carrier namespace; do
        up
        add_links
        verified 60
        case $how in
            address) ip -n fi-a address flush dev eth0 ;;
            carrier) ip -n fi-a link set eth0 down ;;
            namespace)
                # Its device goes with it: a process alone would keep it.
                kill -KILL "$server"
                wait "$server" 2>/dev/null || :
                ip netns delete fi-a
                ;;
        esac
        sleep 0.5
        kill -KILL "$client" "$server" 2>/dev/null || :
        wait "$client" "$server" 2>/dev/null || :
        busywait 20 unheld b
        down
        busywait 10 unload
        modprobe "$KIND"
        echo "$how: gone without a trace"
    done
}
unheld() { ! on "$1" rdma resource show "fi$1" | has -E ' (pd|cq|qp|mr|ctx|srq) [1-9]'; }
unload() { ! grep -q "^$KIND " /proc/modules || rmmod "$KIND"; }

cases=(case06_module_load case06_link_add case06_link_delete case06_planes net_fails_and_comes_back net_gone_for_good)
[ $# = 0 ] || cases=("$@")
plan ${#cases[@]}
for c in "${cases[@]}"; do
    run_case "$c"
    down
done
finish
