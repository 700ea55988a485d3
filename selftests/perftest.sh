#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# perftest.sh [--quick] [--list] [PATTERN...]: the public programs, unmodified: pingpong and
# perftest, over IPv4 and IPv6 GIDs. Runs on both hosts; host 2 reports. --quick shortens what
# repeats; PATTERN (of the shell, e.g. 'write_lat*') chooses steps by name.
#
# A step ends when both programs have ended. When one fails, the other gets ten more seconds.
# It passes when both say so by their status and the tables that they print are sound (see judge).
set -uo pipefail
cd "$(dirname "$0")" || exit
. ./lib.sh
quick='' only_list='' patterns=()
for word in "$@"; do
    case $word in
        --quick) quick=1 ;;
        --list) only_list=1 ;;
        -*) echo "perftest.sh [--quick] [--list] [PATTERN...]" >&2; exit 2 ;;
        *) patterns+=("$word") ;;
    esac
done
bw_n=20 lat_n=100
# Of each of 16 QPs. -a -n 20 -q 16 moves 5.4 GB, and a virtual machine some 30 MB/s: there each
# QP sends 5 of each size (80 all in all), so that all sizes are had in a quarter of the time.
many_n=$bw_n
[ "${KERNEL:-}" != stock ] || many_n=5
: "${PATIENCE:=1200}" # seconds for a step: -a -n 100 moves 3.3 GB
if [ -n "$quick" ]; then all="-s 65536"; else all=-a; fi

# NAME | GID class (4, 6) | COMMAND without device, GID index and address
list() {
    local p g kind strict
    for g in 4 6; do
        echo "rc_pingpong|$g|ibv_rc_pingpong"
        echo "rc_pingpong_events|$g|ibv_rc_pingpong -e"
        echo "srq_pingpong|$g|ibv_srq_pingpong"
        echo "srq_pingpong_events|$g|ibv_srq_pingpong -e"
    done
    for g in 4 6; do
        for kind in "" _strict; do
            strict=
            [ -z "$kind" ] || strict=" --disable_pcie_relaxed"
            for p in write read send; do
                echo "${p}_bw_all$kind|$g|ib_${p}_bw $all -n $bw_n$strict"
                echo "${p}_bw_both_ways$kind|$g|ib_${p}_bw $all -n $bw_n -b$strict"
                echo "${p}_bw_16_qps$kind|$g|ib_${p}_bw $all -n $many_n -q 16$strict"
                echo "${p}_lat_all$kind|$g|ib_${p}_lat $all -n $lat_n$strict"
            done
            for p in CMP_AND_SWAP FETCH_AND_ADD; do
                echo "atomic_bw_$p$kind|$g|ib_atomic_bw -A $p -n 200$strict"
                echo "atomic_lat_$p$kind|$g|ib_atomic_lat -A $p -n $lat_n$strict"
            done
            echo "atomic_bw_16_qps$kind|$g|ib_atomic_bw -n 100 -q 16$strict"
            for p in send read; do
                echo "${p}_bw_events$kind|$g|ib_${p}_bw $all -n $bw_n -e$strict"
                echo "${p}_lat_events$kind|$g|ib_${p}_lat -s 64 -n $lat_n -e$strict"
            done
            echo "atomic_bw_events$kind|$g|ib_atomic_bw -n 100 -e$strict"
            echo "atomic_lat_events$kind|$g|ib_atomic_lat -n $lat_n -e$strict"
            echo "send_bw_srq$kind|$g|ib_send_bw $all -n $bw_n --use-srq$strict"
            echo "send_bw_srq_4_qps$kind|$g|ib_send_bw -s 65536 -n $bw_n --use-srq -q 4$strict"
            echo "send_lat_srq$kind|$g|ib_send_lat -s 64 -n $lat_n --use-srq$strict"
        done
    done
}

chosen() {
    local pattern
    [ ${#patterns[@]} != 0 ] || return 0
    for pattern in "${patterns[@]}"; do
        # shellcheck disable=SC2053
        [[ $1 != $pattern ]] || return 0
    done
    return 1
}

mapfile -t tests < <(list | while IFS='|' read -r name class command; do
    ! chosen "${name}_ipv$class" || echo "${name}_ipv$class|$class|$command"
done)
[ ${#tests[@]} != 0 ] || { echo "perftest.sh: no step is named ${patterns[*]}" >&2; exit 2; }
if [ -n "$only_list" ]; then
    printf '%s\n' "${tests[@]}" | column -t -s'|'
    exit 0
fi
# An emulated machine may get no processor for longer than the half second after which the
# default timeout (14, seven retries) gives a peer up. (pingpong has no such option.)
patience=
[ "${KERNEL:-}" != stock ] || patience=" -u 18"
: "${HOST:?runs in both hosts of qemu-test/run}"
log=/tmp/perftest.$HOST.log # hosts may share /tmp
told=/shared/perftest       # statuses, seen by both hosts
mkdir -p $told

# The programs listen on 18515, perftest and pingpong alike.
listening() { ss -Hltn 'sport = :18515' | has .; }
quiet() { ! listening; }
listening_or_gone() { listening || ! kill -0 "$1" 2>/dev/null; }

# attend STEP PID COMMAND: waits for the program; says every half minute that it does. When the
# other end has failed this one gets ten seconds to notice. Judges what it has printed, and leaves
# the status for the other end: the program's, or 99 when its report is not sound.
attend() {
    local step=$1 pid=$2 command=$3 other=$((3 - HOST)) begun=$SECONDS said=$SECONDS left='' status why
    while kill -0 "$pid" 2>/dev/null; do
        if [ -z "$left" ] && [ "$(cat "$told/$step.$other" 2>/dev/null || echo 0)" != 0 ]; then
            left=$((SECONDS + 10))
        fi
        if [ -n "$left" ] && [ "$SECONDS" -ge "$left" ]; then
            note "$step: host $HOST: ended, host $other has failed"
            kill -KILL "$pid" 2>/dev/null
            break
        fi
        if [ $((SECONDS - said)) -ge 30 ]; then
            said=$SECONDS
            note "$step: host $HOST waits for its program since $((SECONDS - begun)) s: $(tail -1 $log)"
        fi
        sleep 0.1
    done
    wait "$pid" 2>/dev/null
    status=$?
    if [ $status = 0 ] && ! why=$(judge "$command"); then
        note "$step: host $HOST: $why"
        status=99
    fi
    echo $status >"$told/.$step.$HOST"
    mv "$told/.$step.$HOST" "$told/$step.$HOST"
    return $status
}

# judge COMMAND: whether the report in $log holds the results of COMMAND; says what is wrong.
#
# perftest: a row for each size (-a: 2 bytes to 8 MiB), no column of which is anything but a
# number; at least the iterations that were asked for; latencies above 0. Not judged is the
# deviation: perftest's is not a number when the squares of slow iterations overflow.
# A bandwidth has two digits and may round to 0.00 for tiny messages on a slow machine. So the
# rate is what has to be above 0 (six digits, of millions a second), and the average has to be
# what size and rate give. Where perftest says that it found no steady clock ("Correlation
# coefficient", in machines that share their processors), it prints 0 or inf for the next row, and
# for no other. A server prints all that but the peak, the last row alone, or nothing.
# pingpong: both of its results.
judge() {
    awk -v command="$1" -v host="$HOST" '
        function number(s) { return s ~ /^[0-9]+(\.[0-9]+)?$/ }
        function wrong(why) { printf "%s: %s\n", why, $0; bad = 1 }
        function option(name, otherwise,    words, n, i) {
            n = split(command, words, " ")
            for (i = 1; i < n; i++) if (words[i] == name) return words[i + 1]
            return otherwise
        }
        BEGIN {
            pingpong = command ~ /pingpong/
            all = command ~ / -a /
            wanted = pingpong ? 2 : all ? 23 : 1
            size = option("-s", 8) # atomics have no option for it
            least = option("-n", 1)
        }
        pingpong && /Mbit\/sec|usec\/iter/ {
            rows++
            if (!number($(NF - 1)) || $(NF - 1) == 0) wrong("no result")
        }
        /^ *#bytes/ { table = /MsgRate/ ? "bandwidth" : /t_avg/ ? "latency" : "unknown" }
        # Often at the end of a row: perftest does not trust the clock it has measured for the next.
        { distrust = sub(/Correlation coefficient.*/, "") }
        table && /^ *[0-9-]/ && !/---/ {
            rows++
            if (NF != (table == "bandwidth" ? 5 : 9)) wrong("unknown columns")
            for (i = 1; i <= NF; i++) if (i != 7 && !number($i) && !(no_clock && $i == "inf")) { wrong("not a number: " $i); next }
            if (all && host == 1 && rows == 1 && $1 == 2 ^ wanted) rows = wanted
            if ($1 != (all ? 2 ^ rows : size)) wrong("another size")
            if ($2 < least) wrong("fewer iterations than " least)
            if (table == "bandwidth") {
                unit = $1 * 1000000 / 1048576
                off = $4 - $5 * unit
                # A server measures from its first poll to its last, which can find all there is.
                if (host != 1 && $5 == 0 && !no_clock) wrong("no messages a second")
                # Digits that are not printed, of both.
                if ((off < 0 ? -off : off) > 0.01 * $4 + 0.01 + 0.000001 * unit) wrong("average and rate do not fit")
                if (host != 1 && $3 < 0.99 * $4 - 0.01) wrong("peak below average")
            } else for (i = 3; i <= 6; i++) if ($i == 0 && !no_clock) wrong("no time at all")
            no_clock = 0
        }
        distrust { no_clock = 1 }
        END {
            if (rows != wanted && !(host == 1 && !pingpong && rows == 0)) {
                printf "%d results instead of %d\n", rows, wanted
                bad = 1
            }
            exit bad
        }' $log
}

# explain: what a failed program said, and what the device counted.
explain() {
    {
        [ "$1" != 124 ] || echo "it did not end within $PATIENCE s"
        grep -avE '^ *$|^-+$|address:' $log | tail -15
        grep -H . "/sys/class/infiniband/$DEV/ports/1/hw_counters/"*{drop,err,exceeded,retransmit,failed}* 2>/dev/null |
            sed 's,.*/hw_counters/,,' | grep -v ':0$' | tr '\n' ' '
        echo
    } | sed "s/^/# host $HOST: /"
}

# summary: the last line with numbers of a perftest or pingpong report.
summary() { grep -aE '^ *[0-9]+ +[0-9]|usec/iter' $log | tail -1 | tr -s ' \t' ' ' | sed 's/^ //'; }

run_one() {
    local step=$1 class=$2 command=$3 gid=$GID4 peer=${PEERS%% *} address begun=$SECONDS pid status theirs
    if [ "$class" = 6 ]; then
        if [ -z "${GID6:-}" ]; then
            [ "$HOST" != 2 ] || skip "$step" "no IPv6"
            return
        fi
        gid=$GID6
    fi
    case $command in
        # The programs exchange their numbers over IPv4; the data goes by the GID.
        ib_*) address="-d $DEV -x $gid -F$patience" ;;
        *) address="-d $DEV -g $gid" ;;
    esac
    if [ "$HOST" = 1 ]; then
        busywait 20 quiet || note "$step: port 18515 is still in use: $(ss -Hltnp 'sport = :18515')"
        # shellcheck disable=SC2086
        timeout "$PATIENCE" $command $address >$log 2>&1 &
        pid=$!
        busywait 30 listening_or_gone $pid || note "$step: the server does not listen"
        barrier "$step-up"
        attend "$step" $pid "$command"
        status=$?
        barrier "$step-end" $((PATIENCE + 60))
        [ $status = 0 ] || { note "$step: '$command $address' ended with status $status"; explain $status; failed_here=1; }
        # After what host 1 has to say.
        barrier "$step-told"
        return
    fi
    barrier "$step-up" || note "$step: the server did not come up"
    # shellcheck disable=SC2086
    timeout "$PATIENCE" $command $address $peer >$log 2>&1 &
    attend "$step" $! "$command"
    status=$?
    barrier "$step-end" $((PATIENCE + 60))
    barrier "$step-told"
    theirs=$(cat "$told/$step.1" 2>/dev/null || echo unknown)
    if [ $status = 0 ] && [ "$theirs" = 0 ]; then
        ok "$step # $(summary) # $((SECONDS - begun)) s"
        return
    fi
    note "$step: '$command $address $peer' ended with status $status, its server with $theirs"
    explain $status
    not_ok "$step"
}

failed_here=
[ "$HOST" != 2 ] || plan ${#tests[@]}
for t in "${tests[@]}"; do
    IFS='|' read -r step class command <<<"$t"
    run_one "$step" "$class" "$command"
done
[ "$HOST" = 2 ] || exit ${failed_here:-0}
finish
