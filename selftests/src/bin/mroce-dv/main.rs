// SPDX-License-Identifier: GPL-2.0
//! mroce-dv: the extensions (infiniband/metarocedv.h) under traffic and loss: the figures of paths
//! are true, what is set holds, what becomes of paths is told, and nobody sees what is not his.

#![forbid(unsafe_code)]

use selftests::args::Args;
use selftests::dv::{self, Connection, Dv, Path, QpAttr, Transition};
use selftests::endpoint::{self, Device, Endpoint, Remote, Role, Tuning, ALL_ACCESS};
use selftests::ktap::{note, Ktap, Outcome};
use selftests::sys::errno;
use selftests::verbs::{self, Context, Mr, Qp, QpInit, SendWr};
use selftests::{check, fail, skip};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HELP: &str = "\
usage: mroce-dv --listen [ADDRESS:]PORT | --connect ADDRESS[:PORT] [options] [CASE...]

  --dev NAME, --gid INDEX, --ipv6   which device and address
  --netdev NAME                     the interface, for cases that make packets get lost (NETDEV)

CASE is a name or the beginning of one (--list names them). Results are KTAP. Root. Without
--listen and --connect: HOST and PEERS of the test harness.
";

/// Bytes of a message.
const MESSAGE: usize = 65536;
/// Messages that are posted at once.
const BURST: usize = 16;

struct Case {
    name: &'static str,
    run: fn(&Test, &Endpoint, u8) -> Outcome,
}

const CASES: &[Case] = &[
    Case { name: "states_and_sums", run: states_and_sums },
    Case { name: "sizes", run: sizes },
    Case { name: "path_count", run: path_count },
    Case { name: "ordering", run: ordering },
    Case { name: "refused", run: refused },
    Case { name: "own_only", run: own_only },
    Case { name: "listeners", run: listeners },
    Case { name: "lossy_path", run: lossy_path },
    Case { name: "dead_path", run: dead_path },
    Case { name: "planes", run: planes },
    Case { name: "planes_named", run: planes_named },
    Case { name: "controller", run: controller },
    Case { name: "device_controller", run: device_controller },
];

struct Test {
    dv: Dv,
    netdev: String,
    device: Device,
}

/// A QP in a connection of its own (each case has another traffic class), and memory at both ends.
struct Link {
    qp: Arc<Qp>,
    mr: Arc<Mr>,
    remote: Remote,
}

fn text<T>(what: &str, r: std::io::Result<T>) -> Result<T, String> {
    r.map_err(|e| format!("{what}: {e}"))
}

/// The call has to end with this errno.
fn refuse<T>(what: &str, errno: i32, r: std::io::Result<T>) -> Outcome {
    match r {
        Err(e) if e.raw_os_error() == Some(errno) => Ok(()),
        Err(e) => fail!("{what}: {e}, not errno {errno}"),
        Ok(_) => fail!("{what} was not refused"),
    }
}

fn new_qp(ep: &Endpoint) -> Result<Arc<Qp>, String> {
    let cq = text("create_cq", ep.cq(64))?;
    text("create_qp", ep.qp(&QpInit::rc(&cq, &cq, 32, 1, 0)))
}

/// Connects, in the traffic class of the case.
fn connect(ep: &Endpoint, qp: Arc<Qp>, class: u8) -> Result<Link, String> {
    let tuning = Tuning { timeout: 18, ..Tuning::default() };
    let plan = text("plan", ep.plan(&[qp.clone()], &tuning))?;
    let mut to = plan.first().copied().ok_or("no plan")?;
    to.traffic_class = class << 2;
    text("RTR", qp.to_rtr(&to))?;
    text("barrier", ep.barrier("rtr"))?;
    text("RTS", qp.to_rts(&to))?;
    let mr = text("memory", ep.memory(MESSAGE * BURST, ALL_ACCESS))?;
    let remote = text("exchange", ep.exchange_memory(&[&mr]))?.pop().ok_or("no memory")?;
    text("barrier", ep.barrier("rts"))?;
    Ok(Link { qp, mr, remote })
}

impl Link {
    /// Writes `BURST` messages and waits for them.
    fn burst(&self, ep: &Endpoint) -> Outcome {
        let wrs: Vec<SendWr> = (0..BURST)
            .map(|i| SendWr {
                wr_id: i as u64,
                opcode: verbs::IBV_WR_RDMA_WRITE,
                flags: verbs::IBV_SEND_SIGNALED,
                sges: vec![self.mr.sge(i * MESSAGE, MESSAGE)],
                remote_addr: self.remote.addr + (i * MESSAGE) as u64,
                rkey: self.remote.rkey,
                ..SendWr::default()
            })
            .collect();
        self.qp.post_send(&wrs).map_err(|e| format!("posting: {e}"))?;
        for _ in 0..BURST {
            let wc = text("poll", self.qp.send_cq.poll_one(ep.wait))?.ok_or("no completion")?;
            check!(wc.status == verbs::IBV_WC_SUCCESS, "a Write ended in {}", verbs::status_name(wc.status));
        }
        Ok(())
    }

    /// What the leader does, and waits for at the other end.
    fn led(&self, ep: &Endpoint, f: impl FnOnce() -> Outcome) -> Outcome {
        let mine = if ep.leads { f() } else { Ok(()) };
        // The other end may take its time.
        let patience = ep.wait + Duration::from_secs(60);
        let theirs = ep.barrier_within(patience, "done").map_err(|e| format!("the other end: {e}"));
        mine.and(theirs.map_err(Into::into))
    }
}

fn sum(paths: &[Path], f: impl Fn(&Path) -> u64) -> u64 {
    paths.iter().map(f).sum()
}

/// The share of what a path sent that was sent again, over it or another one, in percent.
fn loss(before: &Path, after: &Path) -> f64 {
    let resent = after.resent - before.resent;
    let all = resent + after.packets - before.packets;
    100.0 * (resent + after.moved - before.moved) as f64 / all.max(1) as f64
}

fn states_and_sums(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    check!(t.dv.supports(&ep.context), "the device is not supported");
    let qp = new_qp(ep)?;
    let (none, paths) = text("query in INIT", t.dv.paths(&qp))?;
    check!(none.number == 0 && none.state == dv::METAROCE_CONNECTION_NONE, "a connection in INIT: {none:?}");
    check!(paths.is_empty() && none.now != 0, "in INIT: {none:?}");
    let link = connect(ep, qp, class)?;
    link.led(ep, || {
        link.burst(ep)?;
        let (a, before) = text("query", t.dv.paths(&link.qp))?;
        for _ in 0..8 {
            link.burst(ep)?;
        }
        let (b, after) = text("query", t.dv.paths(&link.qp))?;
        note(&format!("{b:?}"));
        check!(b.state == dv::METAROCE_CONNECTION_UP && b.number != 0 && b.number == a.number, "not up");
        check!(b.local_gid == ep.gid && b.remote_gid != [0; 16] && b.remote_gid != ep.gid, "GIDs");
        check!(b.dscp == u32::from(class) && b.qps == 1, "DSCP and QPs");
        check!(b.now > a.now && b.now - a.now < 600_000_000_000, "the clock");
        check!(b.paths as usize == after.len() && before.len() == after.len(), "{} paths", after.len());
        check!((b.payload_mtu as usize) < MESSAGE && b.payload_mtu >= 512, "payload {}", b.payload_mtu);
        // What paths have sent is what the connection has, and all that was written.
        let packets = sum(&after, |p| p.packets);
        check!(packets == b.sent_packets, "paths: {packets} packets, connection {}", b.sent_packets);
        let bytes = sum(&after, |p| p.bytes);
        check!(bytes == b.sent_bytes, "paths: {bytes} bytes, connection {}", b.sent_bytes);
        let (sent, written) = (b.sent_bytes - a.sent_bytes, (8 * BURST * MESSAGE) as u64);
        let full = u64::from(b.payload_mtu);
        let headers = written.div_ceil(full) * 100;
        check!(sent >= written && sent <= written + headers, "{sent} bytes for {written}");
        let mut ports = Vec::new();
        for p in &after {
            check!(p.state == dv::METAROCE_PATH_GOOD && p.plane == 0, "{p:?}");
            check!(p.min_rtt != 0 && p.srtt >= p.min_rtt && p.srtt < 1_000_000_000, "round trips: {p:?}");
            check!(p.port >= 49152 && p.port <= 65535 && p.window != 0, "{p:?}");
            ports.push(p.port);
        }
        ports.sort_unstable();
        ports.dedup();
        check!(ports.len() == after.len(), "paths share ports");
        let used = after.iter().filter(|p| p.packets != 0).count();
        check!(used == after.len(), "{used} of {} paths were used", after.len());
        Ok(())
    })
}

/// Programs that know more or less of the structures than the library and the kernel.
fn sizes(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let link = connect(ep, new_qp(ep)?, class)?;
    link.led(ep, || {
        link.burst(ep)?;
        let (now, paths) = text("query", t.dv.paths(&link.qp))?;
        let number = |b: &[u8]| u64::from_ne_bytes(b[..8].try_into().expect("8 bytes"));
        for len in [8, 16, 120, 200, 208, 216, 224, 1024] {
            let bytes = text("query", t.dv.connection_bytes(&link.qp, len))?;
            check!(number(&bytes) == now.number, "{len} bytes: number {}", number(&bytes));
            let known = size_of::<Connection>();
            check!(bytes[known.min(len)..len].iter().all(|b| *b == 0), "{len} bytes: not 0 at the end");
            check!(bytes[len..].iter().all(|b| *b == 0xee), "{len} bytes: more was written");
        }
        refuse("7 bytes", errno::EINVAL, t.dv.connection_bytes(&link.qp, 7))?;
        for size in [4, 24, 104, 112, 512] {
            let (count, bytes) = text("query", t.dv.path_bytes(&link.qp, size, 64))?;
            check!(count as usize == paths.len(), "{count} paths of {size} bytes");
            for (i, one) in bytes.chunks_exact(size).enumerate() {
                let want = if i < paths.len() { paths[i].path } else { 0 };
                let is = u32::from_ne_bytes(one[..4].try_into().expect("4 bytes"));
                check!(is == want, "element {i} of {size} bytes: path {is}");
                check!(
                    one[size.min(size_of::<Path>())..].iter().all(|b| *b == 0),
                    "element {i} of {size} bytes: not 0"
                );
            }
        }
        let (count, _) = text("query", t.dv.path_bytes(&link.qp, 104, 3))?;
        check!(count == 3, "room for 3: {count}");
        refuse("elements of 0 bytes", errno::EINVAL, t.dv.path_bytes(&link.qp, 0, 4))?;
        refuse("elements of 513 bytes", errno::EINVAL, t.dv.path_bytes(&link.qp, 513, 4))?;
        refuse("no elements", errno::EINVAL, t.dv.path_bytes(&link.qp, 104, 0))?;
        // What can be set, as the first programs knew it, and as later ones may.
        let relaxed = QpAttr {
            mask: dv::METAROCE_QP_ORDERING,
            ordering: dv::METAROCE_ORDERING_RELAXED,
            ..QpAttr::default()
        };
        for len in [16, 24, 32] {
            text("modify", t.dv.modify_as(&link.qp, &relaxed, len, 0))?;
        }
        refuse("8 bytes", errno::EINVAL, t.dv.modify_as(&link.qp, &relaxed, 8, 0))?;
        refuse("12 bytes", errno::EINVAL, t.dv.modify_as(&link.qp, &relaxed, 12, 0))?;
        refuse("unknown bytes", errno::EOPNOTSUPP, t.dv.modify_as(&link.qp, &relaxed, 32, 1))
    })
}

/// The lesser of what both ends want, whatever the device has; and only before there is one.
fn path_count(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let want = |paths| QpAttr { mask: dv::METAROCE_QP_PATHS, paths, ..QpAttr::default() };
    for (i, (leader, other)) in [(3, 7), (64, 64), (1, 0)].into_iter().enumerate() {
        let qp = new_qp(ep)?;
        let wanted = if ep.leads { leader } else { other };
        text("setting paths", t.dv.modify(&qp, &want(wanted)))?;
        let link = connect(ep, qp, class + i as u8)?;
        link.led(ep, || {
            for _ in 0..4 {
                link.burst(ep)?;
            }
            let (c, paths) = text("query", t.dv.paths(&link.qp))?;
            check!(c.wanted_paths == wanted, "wanted {}", c.wanted_paths);
            let agreed = if other == 0 { leader } else { leader.min(other) };
            check!(c.paths == agreed && paths.len() == agreed as usize, "{} paths, not {agreed}", c.paths);
            check!(paths.iter().any(|p| p.packets != 0), "no path was used");
            Ok(())
        })?;
        refuse("paths of a connection", errno::EISCONN, t.dv.modify(&link.qp, &want(2)))?;
        text("barrier", ep.barrier("refused"))?;
    }
    Ok(())
}

fn ordering(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let qp = new_qp(ep)?;
    let order = |ordering| QpAttr { mask: dv::METAROCE_QP_ORDERING, ordering, ..QpAttr::default() };
    refuse("ordering 2", errno::EINVAL, t.dv.modify(&qp, &order(2)))?;
    text("relaxed", t.dv.modify(&qp, &order(dv::METAROCE_ORDERING_RELAXED)))?;
    let link = connect(ep, qp, class)?;
    let (c, _) = text("query", t.dv.paths(&link.qp))?;
    check!(c.ordering == dv::METAROCE_ORDERING_RELAXED, "ordering {}", c.ordering);
    link.led(ep, || (0..8).try_for_each(|_| link.burst(ep)))?;
    // At any time, also under traffic.
    text("strict", t.dv.modify(&link.qp, &order(dv::METAROCE_ORDERING_STRICT)))?;
    let (c, _) = text("query", t.dv.paths(&link.qp))?;
    check!(c.ordering == dv::METAROCE_ORDERING_STRICT, "ordering {}", c.ordering);
    link.led(ep, || link.burst(ep))
}

fn refused(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let qp = new_qp(ep)?;
    let attr = |mask, value| QpAttr {
        mask,
        paths: value,
        ordering: value,
        events: value,
        planes: value,
        controller: value,
    };
    refuse("an unknown bit", errno::EINVAL, t.dv.modify(&qp, &attr(1 << 5, 0)))?;
    refuse("65 paths", errno::EINVAL, t.dv.modify(&qp, &attr(dv::METAROCE_QP_PATHS, 65)))?;
    refuse("plane 8", errno::EINVAL, t.dv.modify(&qp, &attr(dv::METAROCE_QP_PLANES, 1 << 8)))?;
    refuse("controller 3", errno::EINVAL, t.dv.modify(&qp, &attr(dv::METAROCE_QP_CONTROLLER, 3)))?;
    refuse("listening in INIT", errno::ENOTCONN, t.dv.modify(&qp, &attr(dv::METAROCE_QP_EVENTS, 1)))?;
    refuse("events 2", errno::EINVAL, t.dv.modify(&qp, &attr(dv::METAROCE_QP_EVENTS, 2)))?;
    // All or nothing.
    let all = dv::METAROCE_QP_PATHS
        | dv::METAROCE_QP_PLANES
        | dv::METAROCE_QP_CONTROLLER
        | dv::METAROCE_QP_ORDERING;
    let wrong = QpAttr { mask: all, paths: 5, ordering: 9, events: 0, planes: 1, controller: 1 };
    refuse("one of four", errno::EINVAL, t.dv.modify(&qp, &wrong))?;
    let (c, _) = text("query", t.dv.paths(&qp))?;
    check!(c.wanted_paths == 0 && c.ordering == 0 && c.events == 0, "something was set: {c:?}");
    check!(c.wanted_planes == 0 && c.wanted_controller == 0, "something was set: {c:?}");
    check!(c.planes == 0 && c.controller == 0, "of no connection: {c:?}");
    let mut next = 0;
    let list = text("transitions in INIT", t.dv.transitions(&qp, &mut next, 4))?;
    check!(list.is_empty() && next == 0, "transitions without a connection");
    let link = connect(ep, qp, class)?;
    refuse("room for nothing", errno::EINVAL, t.dv.transitions(&link.qp, &mut next, 0))?;
    // Out of the connection: nothing of it is seen any more.
    text("barrier", ep.barrier("connected"))?;
    text("RESET", link.qp.set_state(verbs::IBV_QPS_RESET))?;
    let (c, paths) = text("query", t.dv.paths(&link.qp))?;
    check!(c.number == 0 && paths.is_empty(), "in RESET: {c:?}");
    text("barrier", ep.barrier("reset"))?;
    Ok(())
}

/// A handle of another context names nothing.
fn own_only(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let link = connect(ep, new_qp(ep)?, class)?;
    let other = text("open", Context::open(t.device.name.as_deref()))?;
    match t.dv.foreign(&link.qp, &other) {
        Err(e) => note(&format!("a queue pair of another context: {e}")),
        Ok(c) => fail!("a queue pair of another context was shown: {c:?}"),
    }
    text("barrier", ep.barrier("seen"))?;
    Ok(())
}

/// As many as there may be listen, and one more when one has gone.
fn listeners(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let events = |on| QpAttr { mask: dv::METAROCE_QP_EVENTS, events: on, ..QpAttr::default() };
    let mut links = Vec::new();
    for _ in 0..=dv::METAROCE_MAX_LISTENERS {
        links.push(connect(ep, new_qp(ep)?, class)?);
    }
    let (last, first) = links.split_last().ok_or("no QPs")?;
    for link in first {
        text("listening", t.dv.modify(&link.qp, &events(1)))?;
        text("listening again", t.dv.modify(&link.qp, &events(1)))?;
    }
    refuse("one too many", errno::ENOSPC, t.dv.modify(&last.qp, &events(1)))?;
    let (one, two) = (&first[0], &first[1]);
    text("not listening", t.dv.modify(&one.qp, &events(0)))?;
    text("listening", t.dv.modify(&last.qp, &events(1)))?;
    refuse("one too many", errno::ENOSPC, t.dv.modify(&one.qp, &events(1)))?;
    text("barrier", ep.barrier("full"))?;
    text("RESET", two.qp.set_state(verbs::IBV_QPS_RESET))?;
    text("listening", t.dv.modify(&one.qp, &events(1)))?;
    text("barrier", ep.barrier("reset"))?;
    Ok(())
}

/// Makes packets of one source port get lost on the own interface, as long as it lives.
struct Weather<'a>(&'a str);

fn tc(arguments: &str) -> Result<(), String> {
    let out = Command::new("tc").args(arguments.split(' ')).output();
    let out = text("tc", out)?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!("tc {arguments}: {}", String::from_utf8_lossy(&out.stderr)))
}

impl<'a> Weather<'a> {
    fn new(netdev: &'a str, port: u32, percent: u32, ipv6: bool) -> Result<Self, String> {
        let weather = Weather(netdev);
        tc(&format!(
            "qdisc add dev {netdev} root handle 1: prio bands 4 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0"
        ))?;
        tc(&format!("qdisc add dev {netdev} parent 1:4 handle 40: netem loss {percent}% limit 10000"))?;
        let (family, field) = if ipv6 { ("ipv6", "ip6") } else { ("ip", "ip") };
        tc(&format!(
            "filter add dev {netdev} parent 1: protocol {family} prio 1 u32 match {field} sport {port} 0xffff flowid 1:4"
        ))?;
        Ok(weather)
    }
}

impl Drop for Weather<'_> {
    fn drop(&mut self) {
        let _ = tc(&format!("qdisc del dev {} root", self.0));
    }
}

fn is_ipv6(ep: &Endpoint) -> bool {
    !ep.gid.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
}

/// One path loses every fifth packet: its figures say so, and no other's.
fn lossy_path(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    if t.netdev.is_empty() {
        skip!("no --netdev");
    }
    let qp = new_qp(ep)?;
    let few = QpAttr { mask: dv::METAROCE_QP_PATHS, paths: 4, ..QpAttr::default() };
    text("setting paths", t.dv.modify(&qp, &few))?;
    let link = connect(ep, qp, class)?;
    link.led(ep, || {
        link.burst(ep)?;
        let (_, paths) = text("query", t.dv.paths(&link.qp))?;
        let chosen = paths.get(2).ok_or("four paths")?;
        let _weather = Weather::new(&t.netdev, chosen.port, 20, is_ipv6(ep))?;
        let (_, before) = text("query", t.dv.paths(&link.qp))?;
        let begun = Instant::now();
        let after = loop {
            for _ in 0..10 {
                link.burst(ep)?;
            }
            let (_, after) = text("query", t.dv.paths(&link.qp))?;
            let moved = after[2].port != chosen.port;
            if moved || after[2].packets - before[2].packets > 1000 || begun.elapsed() > ep.wait {
                break after;
            }
        };
        for (b, a) in before.iter().zip(&after) {
            note(&format!(
                "path {} port {} window {}: {} packets, {:.1} % sent again, srtt {} µs, left {} times",
                a.path,
                a.port,
                a.window,
                a.packets - b.packets,
                loss(b, a),
                a.srtt / 1000,
                a.failures
            ));
        }
        let all = after[2].packets - before[2].packets;
        check!(all >= 200, "path 2 carried {all} packets only");
        let lost = loss(&before[2], &after[2]);
        check!((12.0..30.0).contains(&lost), "path 2 shows {lost:.1} %, it loses 20");
        for i in [0, 1, 3] {
            let lost = loss(&before[i], &after[i]);
            check!(lost < 3.0, "path {i} shows {lost:.1} %, it loses nothing");
        }
        Ok(())
    })
}

/// Waits for the event of a QP.
fn event(ep: &Endpoint, qp: &Qp, patience: Duration) -> Result<bool, String> {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        match text("async event", ep.context.next_event(Duration::from_millis(50)))? {
            Some((verbs::IBV_EVENT_PATH_MIG, number)) if number == qp.number => return Ok(true),
            _ => {}
        }
    }
    Ok(false)
}

/// A path dies: that is told, once, and remembered; and that it is back.
fn dead_path(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    if t.netdev.is_empty() {
        skip!("no --netdev");
    }
    let qp = new_qp(ep)?;
    let few = QpAttr { mask: dv::METAROCE_QP_PATHS, paths: 8, ..QpAttr::default() };
    text("setting paths", t.dv.modify(&qp, &few))?;
    let link = connect(ep, qp, class)?;
    link.led(ep, || {
        for _ in 0..4 {
            link.burst(ep)?;
        }
        let listen = QpAttr { mask: dv::METAROCE_QP_EVENTS, events: 1, ..QpAttr::default() };
        text("listening", t.dv.modify(&link.qp, &listen))?;
        let (c, paths) = text("query", t.dv.paths(&link.qp))?;
        check!(c.events == 1, "it does not listen");
        let mut next = c.next_transition;
        let dead = *paths.get(5).ok_or("eight paths")?;
        let mut all: Vec<Transition> = Vec::new();
        // Until path 5 is as `f` wants it, with traffic.
        let wait = |what: &str, patience: Duration, f: &dyn Fn(&Path) -> bool| {
            let begun = Instant::now();
            loop {
                link.burst(ep)?;
                let (_, now) = text("query", t.dv.paths(&link.qp))?;
                if f(&now[5]) {
                    note(&format!("{what} after {} ms: {:?}", begun.elapsed().as_millis(), now[5]));
                    return Ok(true);
                }
                if begun.elapsed() > patience {
                    note(&format!("{what}: not within {} s: {:?}", patience.as_secs(), now[5]));
                    return Outcome::Ok(false);
                }
            }
        };
        let left = {
            let _weather = Weather::new(&t.netdev, dead.port, 100, is_ipv6(ep))?;
            check!(wait("silent", ep.wait, &|p| p.state != dv::METAROCE_PATH_GOOD)?, "path 5 goes on");
            check!(event(ep, &link.qp, ep.wait)?, "no event");
            // Before anything is read: no further event, whatever happens.
            wait("more traffic", Duration::from_millis(200), &|_| false)?;
            check!(!event(ep, &link.qp, Duration::from_millis(100))?, "an event that nobody asked for");
            all.extend(text("transitions", t.dv.transitions(&link.qp, &mut next, 64))?);
            // It may be left for another port while the weather lasts.
            wait("left", Duration::from_secs(3), &|p| p.failures > dead.failures)?
        };
        check!(wait("good", ep.wait, &|p| p.state == dv::METAROCE_PATH_GOOD)?, "path 5 does not come back");
        check!(event(ep, &link.qp, ep.wait)?, "no event that it is back");
        // In small parts.
        loop {
            let mut rest = text("transitions", t.dv.transitions(&link.qp, &mut next, 2))?;
            if rest.is_empty() {
                break;
            }
            all.append(&mut rest);
        }
        for (i, a) in all.iter().enumerate() {
            note(&format!(
                "{}: path {} state {} to {}, port {} to {}",
                a.number, a.path, a.from_state, a.to_state, a.from_port, a.to_port
            ));
            check!(a.number == c.next_transition + i as u64, "number {} at {i}", a.number);
            check!(i == 0 || a.time >= all[i - 1].time, "time runs backwards");
        }
        let of: Vec<_> = all.iter().filter(|a| a.path == 5).collect();
        check!(of.windows(2).all(|w| w[0].to_state == w[1].from_state), "states do not follow each other");
        let (Some(first), Some(last)) = (of.first(), of.last()) else {
            fail!("nothing of path 5");
        };
        check!(first.from_port == dead.port && first.from_state == dv::METAROCE_PATH_GOOD, "{first:?}");
        check!(first.to_state == dv::METAROCE_PATH_SUSPECT, "{first:?}");
        check!(last.to_state == dv::METAROCE_PATH_GOOD, "{last:?}");
        let failed = of.iter().any(|a| a.to_state == dv::METAROCE_PATH_FAILED);
        check!(failed || !left, "it was left, but that is not remembered");
        Ok(())
    })
}

/// Ids of the planes of the device that are used.
fn planes_of(name: &str) -> Result<Vec<u32>, String> {
    let list = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/planes/list"));
    let list = text("the planes", list)?;
    let up = list.lines().filter(|line| line.split(' ').nth(2) == Some("up"));
    Ok(up.filter_map(|line| line.split(' ').next()?.parse().ok()).collect())
}

/// Each path tells its plane; that it changes is told and remembered. Needs devices with equal
/// planes, the last of which drains meanwhile.
fn planes(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let Some(name) = &t.device.name else {
        skip!("no --dev");
    };
    let all = planes_of(name)?;
    let Some((&last, rest)) = all.split_last().filter(|(_, rest)| !rest.is_empty()) else {
        skip!("the device has one plane");
    };
    let set = |file: &str| {
        let netdev = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/planes/list"))?
            .lines()
            .find(|line| line.starts_with(&format!("{last} ")))
            .and_then(|line| line.split(' ').nth(1).map(str::to_string))
            .ok_or(std::io::ErrorKind::NotFound)?;
        std::fs::write(format!("/sys/class/infiniband/{name}/planes/{file}"), netdev)
    };
    let link = connect(ep, new_qp(ep)?, class)?;
    link.led(ep, || {
        // Bursts until so many of the paths are on each of these planes.
        let spread = |planes: &[u32]| -> Outcome<Vec<Path>> {
            let begun = Instant::now();
            loop {
                link.burst(ep)?;
                let (_, paths) = text("query", t.dv.paths(&link.qp))?;
                let on = |plane: &u32| paths.iter().filter(|p| p.plane == *plane).count();
                let counts: Vec<_> = planes.iter().map(on).collect();
                let even = paths.len() / planes.len();
                if counts.iter().sum::<usize>() == paths.len()
                    && counts.iter().all(|n| (even..=even + 1).contains(n))
                {
                    return Ok(paths);
                }
                check!(begun.elapsed() < ep.wait, "on planes {planes:?} there are {counts:?} paths");
            }
        };
        let before = spread(&all)?;
        check!(before.iter().all(|p| p.peer_plane == p.plane), "planes of the peer: {before:?}");
        let listen = QpAttr { mask: dv::METAROCE_QP_EVENTS, events: 1, ..QpAttr::default() };
        text("listening", t.dv.modify(&link.qp, &listen))?;
        let (c, _) = text("query", t.dv.paths(&link.qp))?;
        let mut next = c.next_transition;
        text("drain", set("drain"))?;
        let left = spread(rest);
        let told = event(ep, &link.qp, ep.wait);
        text("resume", set("resume"))?;
        left?;
        check!(told?, "no event");
        spread(&all)?;
        let changes = text("transitions", t.dv.transitions(&link.qp, &mut next, 64))?;
        for a in &changes {
            note(&format!("{}: path {} on plane {}", a.number, a.path, a.plane));
        }
        for p in before.iter().filter(|p| p.plane == last) {
            let first = changes.iter().find(|a| a.path == p.path);
            check!(first.is_some_and(|a| a.plane != last), "path {} has left: {first:?}", p.path);
        }
        check!(changes.iter().any(|a| a.plane == last), "nothing has come back");
        Ok(())
    })
}

/// A connection sends over the planes that the QP has named which made it, and over all where
/// none of those is there. Where the device has several, the last one is named.
fn planes_named(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let Some(name) = &t.device.name else {
        skip!("no --dev");
    };
    let all = planes_of(name)?;
    let last = *all.last().ok_or("no plane is up")?;
    let absent = (0..8).find(|p| !all.contains(p)).ok_or("eight planes")?;
    let want = |planes| QpAttr { mask: dv::METAROCE_QP_PLANES, planes, ..QpAttr::default() };
    for (i, (named, used)) in [(1 << last, vec![last]), (1 << absent, all.clone())].into_iter().enumerate() {
        let qp = new_qp(ep)?;
        if ep.leads {
            text("naming planes", t.dv.modify(&qp, &want(named)))?;
        }
        let link = connect(ep, qp, class + i as u8)?;
        link.led(ep, || {
            let begun = Instant::now();
            loop {
                link.burst(ep)?;
                let (c, paths) = text("query", t.dv.paths(&link.qp))?;
                check!(c.planes == named && c.wanted_planes == named, "planes {:#x}", c.planes);
                let mut on: Vec<_> = paths.iter().map(|p| p.plane).collect();
                on.sort_unstable();
                on.dedup();
                if on == used {
                    return Ok(());
                }
                check!(begun.elapsed() < ep.wait, "paths are on planes {on:?}, not {used:?}");
            }
        })?;
        refuse("planes of a connection", errno::EISCONN, t.dv.modify(&link.qp, &want(1)))?;
        text("barrier", ep.barrier("refused"))?;
    }
    Ok(())
}

/// Bytes that the controller `fixed` lets each path of a connection have in flight.
fn fixed_window(c: &Connection) -> u32 {
    16 * (c.payload_mtu + 76)
}

/// The windows of a connection do what the QP wanted that made it, whatever the other end does and
/// later QPs want.
fn controller(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let want = |controller| QpAttr { mask: dv::METAROCE_QP_CONTROLLER, controller, ..QpAttr::default() };
    let (first, second) = (new_qp(ep)?, new_qp(ep)?);
    let (mine, theirs) = (dv::METAROCE_CONTROLLER_FIXED, dv::METAROCE_CONTROLLER_AIMD);
    if ep.leads {
        text("fixed windows", t.dv.modify(&first, &want(mine)))?;
        text("others for a later one", t.dv.modify(&second, &want(theirs)))?;
    }
    let link = connect(ep, first, class)?;
    let later = connect(ep, second, class)?;
    let expected = if ep.leads { mine } else { theirs };
    for (qp, wanted) in [(&link.qp, mine), (&later.qp, theirs)] {
        let (c, _) = text("query", t.dv.paths(qp))?;
        check!(c.controller == expected && c.qps == 2, "controller {} of {} QPs", c.controller, c.qps);
        let wanted = if ep.leads { wanted } else { dv::METAROCE_CONTROLLER_DEFAULT };
        check!(c.wanted_controller == wanted, "wanted is {}", c.wanted_controller);
    }
    link.led(ep, || {
        (0..8).try_for_each(|_| link.burst(ep))?;
        let (c, paths) = text("query", t.dv.paths(&link.qp))?;
        let window = fixed_window(&c);
        check!(paths.iter().all(|p| p.window == window), "not all windows are {window}: {paths:?}");
        check!(c.window_cuts == 0, "{} cuts of fixed windows", c.window_cuts);
        Ok(())
    })?;
    refuse("controller of a connection", errno::EISCONN, t.dv.modify(&link.qp, &want(theirs)))?;
    text("barrier", ep.barrier("refused"))?;
    Ok(())
}

/// The device's controller is that of new connections, whose QPs want no other; it is chosen by its
/// name.
fn device_controller(t: &Test, ep: &Endpoint, class: u8) -> Outcome {
    let Some(name) = &t.device.name else {
        skip!("no --dev");
    };
    let file = format!("/sys/class/infiniband/{name}/planes/controller");
    let choose = |name: &str| std::fs::write(&file, name);
    let shown = || text("the controllers", std::fs::read_to_string(&file));
    check!(shown()? == "[aimd] fixed\n", "controllers {}", shown()?);
    for wrong in ["\n", "fix", "fixed aimd", "Fixed", "0"] {
        refuse(&format!("controller {wrong:?}"), errno::EINVAL, choose(wrong))?;
    }
    let before = connect(ep, new_qp(ep)?, class)?;
    text("choosing", choose("fixed\n"))?;
    let chosen = shown();
    let during = connect(ep, new_qp(ep)?, class + 1);
    let other = new_qp(ep)?;
    let want = QpAttr {
        mask: dv::METAROCE_QP_CONTROLLER,
        controller: dv::METAROCE_CONTROLLER_AIMD,
        ..QpAttr::default()
    };
    text("another one", t.dv.modify(&other, &want))?;
    let other = connect(ep, other, class + 2);
    text("choosing", choose("aimd"))?;
    check!(chosen? == "aimd [fixed]\n" && shown()? == "[aimd] fixed\n", "controllers {}", shown()?);
    for (what, link, expected) in [
        ("an earlier connection", before, dv::METAROCE_CONTROLLER_AIMD),
        ("a new one", during?, dv::METAROCE_CONTROLLER_FIXED),
        ("one that wants another", other?, dv::METAROCE_CONTROLLER_AIMD),
    ] {
        link.led(ep, || link.burst(ep))?;
        let (c, paths) = text("query", t.dv.paths(&link.qp))?;
        check!(c.controller == expected, "{what} has controller {}", c.controller);
        if expected == dv::METAROCE_CONTROLLER_FIXED {
            // Those of the other one may pass this size.
            let fixed = paths.iter().all(|p| p.window == fixed_window(&c));
            check!(fixed, "{what} has windows {paths:?}");
        }
    }
    Ok(())
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, CASES.iter().map(|c| c.name));
    let role = Role::from_args(&mut args);
    let device = Device::from_args(&mut args);
    let netdev = args.text("--netdev").or_else(|| std::env::var("NETDEV").ok()).unwrap_or_default();
    let wanted = args.positionals();
    args.finish();
    let cases: Vec<&Case> = CASES
        .iter()
        .filter(|c| wanted.is_empty() || wanted.iter().any(|w| c.name.starts_with(w.as_str())))
        .collect();
    let outcome = endpoint::run(&role, &device, Duration::from_secs(20), |ep| {
        let dv = Dv::load().map_err(|e| e.to_string())?;
        let test = Test { dv, netdev: netdev.clone(), device: device.clone() };
        let mut ktap = Ktap::new(cases.len());
        for case in &cases {
            // Room for those that use several classes.
            let at = CASES.iter().position(|c| c.name == case.name).unwrap_or(0);
            let class = 1 + at as u8 * 3;
            if !ktap.run(case.name, || (case.run)(&test, &ep, class)) {
                // The other end waits at another point now.
                break;
            }
        }
        Ok(ktap.finish())
    });
    std::process::exit(outcome.unwrap_or_else(|error| {
        println!("Bail out! {error}");
        1
    }));
}
