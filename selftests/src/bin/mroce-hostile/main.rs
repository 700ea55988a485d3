// SPDX-License-Identifier: GPL-2.0
//! mroce-hostile: two hosts move data of which every byte, completion and atomic is checked,
//! and one of them is hostile besides: it sends to the other one, by raw frames, what no
//! sender may send. Whatever it is, the data stays right, no request fails, no connection is
//! made anew, each packet is counted, nobody gets more than he sent, and the log stays quiet.

#![forbid(unsafe_code)]

mod attacks;
mod packet;
mod sacrifice;
mod traffic;

use attacks::{Expected, Sender, Spy};
use sacrifice::Sacrifice;
use selftests::args::{self, Args};
use selftests::endpoint::{self, Device, Endpoint, Role};
use selftests::ktap::{note, Ktap, Outcome, Stop};
use selftests::{check, fail};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};
use traffic::{State, Traffic};

const HELP: &str = "\
usage: mroce-hostile --listen [ADDRESS:]PORT | --connect ADDRESS[:PORT] [options] [CASE...]
       mroce-hostile --list

The connecting end attacks the other one. IPv4, root. Without a role, HOST=1 listens and any
other HOST connects to the first of PEERS.

  --dev NAME --gid INDEX   device and GID (defaults: RDMA_DEV, GID4, or what fits)
  --netdev NAME            its interface (default NETDEV)
  --seconds N              how long the rate is measured, each time (default 3)
  --least PERCENT          of the rate that has to be left under a flood (default 50)
  --wait N                 seconds that one request may take (default 30)
  --seed N                 source of random choices

CASE is a name or the beginning of one. Results are KTAP.
";

type Attack = fn(&Spy, &mut Sender) -> Outcome<Expected>;

const ATTACKS: &[(&str, Attack)] = &[
    ("case23_truncated", attacks::truncated),
    ("case23_fields_out_of_range", attacks::fields),
    ("case23_wrong_crc", attacks::damaged),
    ("hostile_guessed_ids", attacks::guessed_ids),
    ("hostile_guessed_handshakes", attacks::guessed_handshakes),
    ("hostile_handshake_from_elsewhere", attacks::other_source),
    ("hostile_replayed", attacks::replayed),
    ("hostile_lies_with_the_right_id", attacks::lies),
];
const MUTATED: &str = "hostile_mutated_packets";
const AMPLIFICATION: &str = "hostile_no_amplification";

/// Connections that are given up, and packets that each of them gets.
const SACRIFICES: u8 = 40;
const MUTANTS: u64 = 400;

/// What the hostile end wants of the other one: its report, a connection that is given up (with the
/// DSCP that names it), its end.
mod want {
    pub const REPORT: u64 = 1;
    pub const SACRIFICE: u64 = 2;
    pub const END: u64 = 3;
}
const FLOOD: &str = "hostile_flood";

/// What an end tells of itself.
#[derive(Default)]
struct Report {
    counters: BTreeMap<String, u64>,
    rounds: u64,
    log: u64,
    /// Unreclaimable memory of the kernel, KiB.
    slab: u64,
    fault: String,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl Report {
    fn own(device: &str, state: &State) -> Outcome<Self> {
        let folder = format!("/sys/class/infiniband/{device}/ports/1/hw_counters");
        let mut counters = BTreeMap::new();
        for entry in std::fs::read_dir(&folder).map_err(|e| format!("{folder}: {e}"))? {
            let entry = entry.map_err(text)?;
            let value = std::fs::read_to_string(entry.path()).unwrap_or_default();
            if let Ok(n) = value.trim().parse() {
                counters.insert(entry.file_name().to_string_lossy().into_owned(), n);
            }
        }
        let log = std::process::Command::new("dmesg").output().map_err(text)?.stdout;
        let memory = std::fs::read_to_string("/proc/meminfo").map_err(text)?;
        let slab = memory
            .lines()
            .filter(|l| l.starts_with("SUnreclaim:"))
            .find_map(|l| l.split_whitespace().nth(1)?.parse().ok());
        Ok(Report {
            counters,
            rounds: state.rounds.load(Ordering::Relaxed),
            log: log.iter().filter(|b| **b == b'\n').count() as u64,
            slab: slab.unwrap_or(0),
            fault: state.fault().unwrap_or_default(),
        })
    }

    fn to_text(&self) -> String {
        let mut lines = vec![
            format!("rounds {}", self.rounds),
            format!("log {}", self.log),
            format!("slab {}", self.slab),
            format!("fault {}", self.fault.replace('\n', " ")),
        ];
        lines.extend(self.counters.iter().map(|(k, v)| format!("c {k} {v}")));
        lines.join("\n")
    }

    fn from_text(text: &str) -> Self {
        let mut r = Report::default();
        for line in text.lines() {
            match line.split_once(' ') {
                Some(("rounds", v)) => r.rounds = v.parse().unwrap_or(0),
                Some(("log", v)) => r.log = v.parse().unwrap_or(0),
                Some(("slab", v)) => r.slab = v.parse().unwrap_or(0),
                Some(("fault", v)) => r.fault = v.into(),
                Some(("c", rest)) => {
                    if let Some((k, v)) = rest.split_once(' ') {
                        r.counters.insert(k.into(), v.parse().unwrap_or(0));
                    }
                }
                _ => {}
            }
        }
        r
    }

    /// What was dropped meanwhile, for a message.
    fn risen(&self, before: &Report) -> String {
        let drops = self.counters.keys().filter(|name| name.starts_with("drop_"));
        let risen = drops.map(|name| (name, self.rise(before, name))).filter(|(_, n)| *n != 0);
        risen.map(|(name, n)| format!("{name}:{n}")).collect::<Vec<_>>().join(" ")
    }

    fn rise(&self, before: &Report, name: &str) -> u64 {
        name.split('+')
            .map(|n| {
                let of = |r: &Report| r.counters.get(n).copied().unwrap_or(0);
                of(self).saturating_sub(of(before))
            })
            .sum()
    }
}

/// Asks the other end for its report.
fn ask(ep: &Endpoint) -> Outcome<Report> {
    let mut oob = ep.oob();
    oob.send_words(&[want::REPORT]).map_err(text)?;
    let answer = oob.exchange_text("").map_err(text)?;
    Ok(Report::from_text(&answer))
}

/// The end that is attacked: does what the other one wants.
fn serve(ep: &Endpoint, state: &State) -> Outcome {
    loop {
        let command = ep.oob().recv_words().map_err(text)?;
        match *command.as_slice() {
            [want::REPORT] => {
                let report = Report::own(&ep.context.name, state)?;
                ep.oob().exchange_text(&report.to_text()).map_err(text)?;
            }
            [want::SACRIFICE, dscp] => give_up(ep, dscp as u8, |_| {
                let end = ep.oob().recv_words().map_err(text)?;
                check!(end == [want::END], "{end:?} instead of the end");
                Ok(())
            })
            .map(drop)?,
            _ => return Ok(()),
        }
    }
}

/// A connection that this DSCP names moves data while `act` goes on. Both ends call it. How many
/// requests ended well, and whether one ended with an error.
fn give_up(ep: &Endpoint, dscp: u8, act: impl FnOnce(&Sacrifice) -> Outcome) -> Outcome<(u64, bool)> {
    let sacrifice = Sacrifice::new(ep, dscp, u64::from(dscp))?;
    let acted = std::thread::scope(|scope| {
        scope.spawn(|| sacrifice.run());
        let acted = act(&sacrifice);
        sacrifice.stop.store(true, Ordering::Relaxed);
        acted
    });
    acted.and_then(|()| sacrifice.guards())?;
    Ok((sacrifice.done.load(Ordering::Relaxed), sacrifice.failed.load(Ordering::Relaxed)))
}

struct Options {
    netdev: String,
    seconds: u64,
    least: u64,
    seed: u64,
    cases: Vec<String>,
}

/// What must not have changed, whatever was sent to this connection or another one.
fn goes_on(before: &Report, after: &Report, state: &State) -> Outcome {
    if let Some(fault) = state.fault() {
        fail!("the hostile end's own traffic: {fault}");
    }
    check!(after.fault.is_empty(), "the other end's traffic: {}", after.fault);
    check!(after.rounds > before.rounds, "the other end's traffic stands still");
    check!(after.log <= before.log + 3, "{} lines in the log", after.log - before.log);
    Ok(())
}

/// Nor has any connection.
fn unharmed(before: &Report, after: &Report, state: &State) -> Outcome {
    goes_on(before, after, state)?;
    for name in ["conn_opened", "conn_errors"] {
        check!(after.rise(before, name) == 0, "{name} has risen by {}", after.rise(before, name));
    }
    Ok(())
}

/// Waits until this end's traffic has done some more rounds.
fn progress(state: &State, patience: Duration) -> Outcome {
    let from = state.rounds.load(Ordering::Relaxed);
    let end = Instant::now() + patience;
    while state.rounds.load(Ordering::Relaxed) < from + 3 {
        if let Some(fault) = state.fault() {
            fail!("traffic: {fault}");
        }
        check!(Instant::now() < end, "traffic stands still");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn one(ep: &Endpoint, state: &State, spy: &mut Spy, sender: &mut Sender, attack: Attack) -> Outcome {
    spy.look(Duration::from_millis(300))?;
    check!(spy.to != 0 && spy.from != 0, "no ids were seen");
    let before = ask(ep)?;
    let (from, start) = (sender.packets, Instant::now());
    let expected = attack(spy, sender)?;
    note(&format!("{} packets in {} ms", sender.packets - from, start.elapsed().as_millis()));
    progress(state, ep.wait)?;
    std::thread::sleep(Duration::from_millis(200));
    progress(state, ep.wait)?;
    let after = ask(ep)?;
    for (name, n) in &expected {
        let rise = after.rise(&before, name);
        note(&format!("{name} has risen by {rise}, {n} or more are due"));
        check!(rise >= *n, "{name} has risen by {rise}, not by {n}; {}", after.risen(&before));
    }
    unharmed(&before, &after, state)
}

/// Waits until requests over the connection have ended well.
fn moves(sacrifice: &Sacrifice, spy: &mut Spy, patience: Duration) -> Outcome {
    let end = Instant::now() + patience;
    while sacrifice.done.load(Ordering::Relaxed) < 20 || spy.route.is_none() {
        check!(!sacrifice.failed.load(Ordering::Relaxed), "a request over a new connection fails");
        check!(Instant::now() < end, "nothing moves over a new connection");
        // All the time: other traffic fills the buffer of the socket, and what comes then is not seen.
        spy.look(Duration::from_millis(1))?;
    }
    Ok(())
}

/// Whoever holds the ids of a connection may end it, and write where it has keys for; the machine, other
/// connections between the same hosts and other memory do not notice, and the next connection works.
fn mutated(ep: &Endpoint, state: &State, sender: &mut Sender, options: &Options, peer: [u8; 4]) -> Outcome {
    let before = ask(ep)?;
    let (from, mut done, mut failed) = (sender.packets, 0, 0);
    for dscp in 1..=SACRIFICES + 1 {
        let mut spy = Spy::new(&options.netdev, ipv4(ep.gid), peer, dscp)?;
        ep.oob().send_words(&[want::SACRIFICE, u64::from(dscp)]).map_err(text)?;
        let (requests, error) = give_up(ep, dscp, |sacrifice| {
            let acted = moves(sacrifice, &mut spy, ep.wait).and_then(|()| {
                if dscp > SACRIFICES {
                    return Ok(());
                }
                spy.look(Duration::from_millis(20))?;
                attacks::mutated(&mut spy, sender, MUTANTS)
            });
            ep.oob().send_words(&[want::END]).map_err(text)?;
            acted
        })
        .map_err(|stop| match stop {
            Stop::Fail(why) | Stop::Skip(why) => format!("connection {dscp}: {why}"),
        })?;
        (done, failed) = (done + requests, failed + u64::from(error));
    }
    progress(state, ep.wait)?;
    let after = ask(ep)?;
    note(&format!(
        "{} packets to {SACRIFICES} connections, on which {done} requests had ended, {failed} with an error; {}",
        sender.packets - from,
        after.risen(&before)
    ));
    goes_on(&before, &after, state)
}

/// Adds the addresses of strangers to the own interface, or takes them away.
fn strangers(spy: &Spy, verb: &str, netdev: &str) -> Outcome {
    for i in 0..attacks::STRANGERS {
        let address = attacks::stranger(spy, i).map(|b| b.to_string()).join(".") + "/32";
        let ip = std::process::Command::new("ip").args(["address", verb, &address, "dev", netdev]).status();
        check!(ip.is_ok_and(|s| s.success()), "ip address {verb} {address} does not work");
    }
    Ok(())
}

fn amplification(ep: &Endpoint, state: &State, spy: &mut Spy, sender: &mut Sender, netdev: &str) -> Outcome {
    spy.look(Duration::from_millis(300))?;
    let before = ask(ep)?;
    spy.received.clear();
    sender.sent.clear();
    strangers(spy, "add", netdev)?;
    let sent = attacks::unproven(spy, sender).and_then(|_| spy.look(Duration::from_secs(2)));
    strangers(spy, "delete", netdev)?;
    sent?;
    let (mut most, mut answered) = (0, 0);
    for (address, sent) in &sender.sent {
        let back = spy.received.get(address).copied().unwrap_or(0);
        check!(back <= *sent, "{address:?} has sent {sent} bytes and got {back}");
        most = most.max(back * 100 / sent);
        answered += u64::from(back != 0);
    }
    note(&format!(
        "{} addresses, {answered} of them answered; at most {most} % of what one had sent came back",
        sender.sent.len()
    ));
    check!(answered > 0, "nobody was answered: nothing was measured");
    progress(state, ep.wait)?;
    unharmed(&before, &ask(ep)?, state)
}

fn rate(ep: &Endpoint, state: &State, seconds: u64) -> Outcome<f64> {
    let (from, start) = (state.bytes.load(Ordering::Relaxed), Instant::now());
    while start.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_millis(20));
        check!(state.fault().is_none(), "traffic: {}", state.fault().unwrap_or_default());
    }
    let _ = ep;
    Ok((state.bytes.load(Ordering::Relaxed) - from) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

fn flood(ep: &Endpoint, state: &State, spy: &mut Spy, sender: &mut Sender, options: &Options) -> Outcome {
    spy.look(Duration::from_millis(300))?;
    let before = ask(ep)?;
    let alone = rate(ep, state, options.seconds)?;
    let mut under = |victim| -> Outcome<(f64, u64)> {
        let frames = attacks::flood_frames(spy, sender, victim)?;
        let until = Instant::now() + Duration::from_millis(options.seconds * 1000 + 500);
        let (rate, sent) = std::thread::scope(|scope| {
            let flooding = scope.spawn(|| sender.flood(&frames, until));
            std::thread::sleep(Duration::from_millis(300));
            let rate = rate(ep, state, options.seconds);
            (rate, flooding.join().unwrap_or_else(|_| Err("the flood panicked".into())))
        });
        Ok((rate?, sent?))
    };
    // Both hosts may share processors: what sending alone takes from them is no matter of
    // the one that is flooded.
    let (beside, _) = under(false)?;
    let (flooded, sent) = under(true)?;
    progress(state, ep.wait)?;
    let after = ask(ep)?;
    let left = flooded * 100.0 / beside;
    note(&format!(
        "{alone:.1} MB/s alone, {beside:.1} beside a flood to nobody, {flooded:.1} ({left:.0} %) under {} packets/s; slab {:+} KiB; log {:+} lines",
        sent * 2 / (options.seconds * 2 + 1),
        after.slab as i64 - before.slab as i64,
        after.log - before.log
    ));
    unharmed(&before, &after, state)?;
    // Where nothing is judged, on kernels that check themselves, sending takes its time, too.
    let flood = if options.least == 0 { 100 } else { 1000 };
    check!(sent > flood * options.seconds, "a flood of {sent} packets is none");
    check!(after.slab < before.slab + 16 * 1024, "memory has grown by {} KiB", after.slab - before.slab);
    check!(left >= options.least as f64, "{left:.0} % of the rate are left, not {}", options.least);
    Ok(())
}

fn ipv4(gid: [u8; 16]) -> [u8; 4] {
    [gid[12], gid[13], gid[14], gid[15]]
}

fn lead(ep: &Endpoint, state: &State, options: &Options) -> Outcome<i32> {
    let theirs = ep.oob().recv_words().map_err(text)?;
    let mut peer = [0; 16];
    for (to, from) in peer.iter_mut().zip(theirs) {
        *to = from as u8;
    }
    let mut spy = Spy::new(&options.netdev, ipv4(ep.gid), ipv4(peer), 0)?;
    let mut sender = Sender::new(&options.netdev, options.seed)?;
    let wanted = |name: &str| options.cases.is_empty() || options.cases.iter().any(|c| name.starts_with(c));
    let names = ATTACKS.iter().map(|a| a.0).chain([MUTATED, AMPLIFICATION, FLOOD]);
    let mut ktap = Ktap::new(names.filter(|n| wanted(n)).count());
    note(&format!("device {}, seed {}", ep.context.name, options.seed));
    progress(state, ep.wait)?;
    for (name, attack) in ATTACKS {
        if wanted(name) {
            ktap.run(name, || one(ep, state, &mut spy, &mut sender, *attack));
        }
    }
    if wanted(MUTATED) {
        ktap.run(MUTATED, || mutated(ep, state, &mut sender, options, ipv4(peer)));
    }
    if wanted(AMPLIFICATION) {
        ktap.run(AMPLIFICATION, || amplification(ep, state, &mut spy, &mut sender, &options.netdev));
    }
    if wanted(FLOOD) {
        ktap.run(FLOOD, || flood(ep, state, &mut spy, &mut sender, options));
    }
    Ok(ktap.finish())
}

fn end(ep: Endpoint, options: &Options) -> Result<i32, String> {
    let plain = |stop: Stop| match stop {
        Stop::Fail(why) | Stop::Skip(why) => why,
    };
    let traffic = Traffic::new(&ep, options.seed ^ u64::from(ep.leads)).map_err(plain)?;
    let state = Arc::new(State::default());
    ep.barrier("traffic").map_err(text)?;
    if !ep.leads {
        let words: Vec<u64> = ep.gid.iter().map(|b| u64::from(*b)).collect();
        ep.oob().send_words(&words).map_err(text)?;
    }
    let status = std::thread::scope(|scope| {
        let running = scope.spawn(|| traffic.run(&state));
        let status = if ep.leads {
            lead(&ep, &state, options).map_err(plain)
        } else {
            serve(&ep, &state).map_err(plain).map(|()| 0)
        };
        // The end that is attacked hears of the end by this; a broken channel ends it as well.
        if ep.leads {
            let _ = ep.oob().send_words(&[0]);
        }
        state.stop.store(true, Ordering::Relaxed);
        let _ = running.join();
        status
    })?;
    if let Some(fault) = state.fault() {
        return Err(format!("traffic: {fault}"));
    }
    ep.barrier("stopped").map_err(text)?;
    traffic.is_well().map_err(plain)?;
    traffic.guards().map_err(plain)?;
    while let Some((kind, _)) = ep.context.next_event(Duration::ZERO).map_err(text)? {
        // The strangers' addresses came and went.
        if kind != selftests::verbs::IBV_EVENT_GID_CHANGE {
            return Err(format!("an event: {}", selftests::verbs::event_name(kind)));
        }
    }
    ep.barrier("done").map_err(text)?;
    Ok(status)
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, ATTACKS.iter().map(|a| a.0).chain([MUTATED, AMPLIFICATION, FLOOD]));
    let device = Device::from_args(&mut args);
    let wait = Duration::from_secs(args.value("--wait").unwrap_or(30));
    let mut options = Options {
        netdev: args.text("--netdev").or_else(|| args::env("NETDEV")).unwrap_or_else(|| "eth0".into()),
        seconds: args.value("--seconds").unwrap_or(3),
        least: args.value("--least").unwrap_or(50),
        seed: args.value("--seed").unwrap_or(u64::from(std::process::id())),
        cases: Vec::new(),
    };
    let role = Role::from_args(&mut args);
    options.cases = args.positionals();
    args.finish();
    let result = endpoint::run(&role, &device, wait, |ep| end(ep, &options));
    std::process::exit(result.unwrap_or_else(|error| {
        eprintln!("mroce-hostile: {error}");
        1
    }));
}
