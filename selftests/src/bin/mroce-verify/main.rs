// SPDX-License-Identifier: GPL-2.0
//! mroce-verify: two ends exchange every kind of request and check every byte, the order and
//! the number of completions, against a model of RC semantics. Works with any RC provider.

#![forbid(unsafe_code)]

mod fixed;
mod flag;
mod model;
mod random;
mod shared;

use selftests::args::{self, Args};
use selftests::endpoint::{self, Device, Endpoint, Role, Tuning};
use selftests::ktap::{self, Ktap, Outcome, Stop};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const HELP: &str = "\
usage: mroce-verify --listen [ADDRESS:]PORT | --connect ADDRESS[:PORT] | --pair DEVICE[,DEVICE] [options]

Without a role, HOST=1 listens and any other HOST connects to the first of PEERS.

  --dev NAME --gid INDEX --ipv6   device and GID (defaults: RDMA_DEV, GID4 or GID6, or what fits)
  --seed N           repeats a run (printed at its start)
  --short            a short set for slow machines
  --seconds N        time for the suites that repeat (default 60, 10 with --short)
  --suites A,B       only these (--list names them)
  --payload-mtu N    bytes of payload of one packet on this link, for sizes around it (default:
                     what the interface's MTU leaves)
  --max-size N       longest message of the size suite (default 64m, 1m with --short)
  --max-message N    bytes that the max_msg_size suite moves at most (default: what the port says)
  --wait N           seconds that one completion may take (default 30)
  --timeout N        ACK timeout of the QPs, 4.096 us << N (default 14)
  --patience N       seconds that this end goes on trying to connect a QP that its device refuses
                     to connect, as while the interface is down (default 0)
  --round N          first round of the random suite, to repeat a failure
  --verbose          says what each random round does
  --no-skip          a suite that cannot run here is a failure

All options but role, device and patience are taken from the connecting end. Results are KTAP, on the
connecting end; the exit status is 0 for success, 1 for failure, 2 for a wrong command line.
";

/// What a suite may know.
pub struct Run {
    /// Source of all random choices.
    pub seed: u64,
    /// The short set.
    pub short: bool,
    /// Time for a suite that repeats.
    pub budget: Duration,
    /// Payload bytes of a packet.
    pub payload: usize,
    /// Longest message of the size suite.
    pub max_size: usize,
    /// Bytes that the longest message may have, whatever the port allows.
    pub max_message: u64,
    /// ACK timeout code.
    pub timeout: u8,
    /// First round of the random suite.
    pub first_round: u64,
    verbose: bool,
}

impl Run {
    /// Attributes of the connections.
    pub fn tuning(&self) -> Tuning {
        Tuning { timeout: self.timeout, ..Tuning::default() }
    }

    /// Prints a line on the leading end.
    pub fn note(&self, ep: &Endpoint, text: &str) {
        if ep.leads {
            ktap::note(text);
        }
    }

    /// The same, with --verbose only.
    pub fn verbose(&self, ep: &Endpoint, text: &str) {
        if self.verbose {
            self.note(ep, text);
        }
    }
}

type Suite = (&'static str, u32, fn(&Run, &Endpoint) -> Outcome);

/// Name, share of the repeating time, function.
const SUITES: &[Suite] = &[
    ("sizes", 0, fixed::sizes),
    ("inline", 0, fixed::inline),
    ("max_msg_size", 0, fixed::max_msg_size),
    ("big_region", 0, fixed::big_region),
    ("huge_pages", 0, fixed::huge_pages),
    ("invalidate", 0, fixed::invalidate),
    ("rereg", 0, fixed::rereg),
    ("cq_resize", 0, shared::cq_resize),
    ("events", 0, shared::events),
    ("srq_limit", 0, shared::srq_limit),
    ("flag_after_data", 3, flag::flag_after_data),
    ("last_byte", 3, flag::last_byte),
    ("atomic_sum", 1, shared::atomic_sum),
    ("many_threads_one_qp", 1, shared::many_threads),
    ("many_qps", 0, shared::many_qps),
    ("random", 12, random::random),
];

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn end(ep: &Endpoint, given: &Run, chosen: &[&Suite], no_skip: bool) -> Result<i32, String> {
    // The leading end's options hold on both.
    let mut mask = 0u64;
    for (i, suite) in SUITES.iter().enumerate() {
        if chosen.iter().any(|c| c.0 == suite.0) {
            mask |= 1 << i;
        }
    }
    let words = [
        given.seed,
        u64::from(given.short),
        given.budget.as_millis() as u64,
        given.payload as u64,
        given.max_size as u64,
        u64::from(given.timeout),
        given.first_round,
        mask,
        ep.wait.as_millis() as u64,
        u64::from(given.verbose),
        given.max_message,
    ];
    let theirs = ep.oob().exchange(&words).map_err(text)?;
    let w: &[u64] = if ep.leads { &words } else { &theirs };
    let [seed, short, budget, payload, max_size, timeout, first_round, mask, _, verbose, max_message] = w
    else {
        return Err("the other end is another version of this program".into());
    };
    let mut run = Run {
        seed: *seed,
        short: *short == 1,
        budget: Duration::ZERO,
        payload: *payload as usize,
        max_size: *max_size as usize,
        timeout: *timeout as u8,
        first_round: *first_round,
        verbose: *verbose == 1,
        max_message: *max_message,
    };
    if run.payload == 0 {
        run.payload = ep.payload_mtu().map_err(|e| format!("{e} (--payload-mtu tells what it is)"))?;
    }
    let suites: Vec<&Suite> =
        SUITES.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, s)| s).collect();
    let shares: u32 = suites.iter().map(|s| s.1).sum();
    let mut ktap = ep.leads.then(|| Ktap::new(suites.len()));
    run.note(
        ep,
        &format!(
            "device {}, seed {}, payload MTU {}, {} s for repeating suites{}",
            ep.context.name,
            run.seed,
            run.payload,
            *budget as f64 / 1000.0,
            if run.short { ", short set" } else { "" }
        ),
    );
    let mut failed = false;
    for (name, share, suite) in suites {
        run.budget = Duration::from_millis(budget * u64::from(*share) / u64::from(shares.max(1)));
        ep.oob().barrier(name).map_err(text)?;
        let start = Instant::now();
        let mut outcome = suite(&run, ep);
        // What the device had to say meanwhile helps to understand a failure.
        if let Err(Stop::Fail(why)) = &mut outcome {
            while let Ok(Some((kind, qpn))) = ep.context.next_event(Duration::ZERO) {
                why.push_str(&format!("\nevent: {} (QP {qpn:#x})", selftests::verbs::event_name(kind)));
            }
        }
        let (mine, skipped) = match &outcome {
            Ok(()) => (String::new(), None),
            Err(Stop::Skip(why)) => (String::new(), Some(why.clone())),
            Err(Stop::Fail(why)) => {
                (format!("{} end: {why}", if ep.leads { "connecting" } else { "listening" }), None)
            }
        };
        if !mine.is_empty() && !ep.leads {
            ktap::note(&format!("{name}: {mine}"));
        }
        let sent = if let Some(why) = &skipped { format!("skip:{why}") } else { mine.clone() };
        let theirs = ep.oob().end_part(&sent).map_err(text)?;
        if let Some(why) = theirs.strip_prefix("skip:") {
            if outcome.is_ok()
                || matches!(&outcome, Err(Stop::Fail(t)) if t.contains("the other end stopped"))
            {
                outcome = Err(Stop::Skip(why.to_string()));
            }
        } else if !theirs.is_empty() {
            // An end that only noticed the other one's stop has nothing to add.
            let told = [theirs, mine];
            let all: Vec<&str> =
                told.iter().map(String::as_str).filter(|t| !t.contains("the other end stopped")).collect();
            let all = all.join("\n");
            outcome = Err(Stop::Fail(format!("{}\nseed {}", all.trim(), run.seed)));
        } else if let Err(Stop::Fail(_)) = outcome {
            outcome = Err(Stop::Fail(format!("{mine}\nseed {}", run.seed)));
        }
        if let (true, Err(Stop::Skip(why))) = (no_skip, &outcome) {
            outcome = Err(Stop::Fail(format!("it has to run here, but: {why}")));
        }
        failed |= matches!(outcome, Err(Stop::Fail(_)));
        if let Some(ktap) = &mut ktap {
            ktap.report(&format!("verify_{name}"), start, &outcome);
        }
    }
    Ok(match ktap {
        Some(ktap) => ktap.finish(),
        None => i32::from(failed),
    })
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, SUITES.iter().map(|s| s.0));
    let short = args.flag("--short");
    let no_skip = args.flag("--no-skip");
    let wanted = args.text("--suites").unwrap_or_default();
    let chosen: Vec<&Suite> = if wanted.is_empty() {
        SUITES.iter().collect()
    } else {
        wanted
            .split(',')
            .map(|name| match SUITES.iter().find(|s| s.0 == name) {
                Some(suite) => suite,
                None => args::usage(&format!("no suite '{name}' (--list names them)")),
            })
            .collect()
    };
    let clock =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64 % 1_000_000_007);
    let run = Run {
        seed: args.value("--seed").unwrap_or(clock),
        short,
        budget: Duration::from_secs(args.value("--seconds").unwrap_or(if short { 10 } else { 60 })),
        payload: args.size("--payload-mtu").or_else(|| args::env("PAYLOAD_MTU")).unwrap_or(0) as usize,
        max_size: args.size("--max-size").unwrap_or(if short { 1 << 20 } else { 64 << 20 }) as usize,
        timeout: args.value("--timeout").unwrap_or(14),
        first_round: args.value("--round").unwrap_or(0),
        verbose: args.flag("--verbose"),
        max_message: args.size("--max-message").unwrap_or(u64::MAX),
    };
    let wait = Duration::from_secs(args.value("--wait").unwrap_or(30));
    let patience = Duration::from_secs(args.value("--patience").unwrap_or(0));
    let device = Device::from_args(&mut args);
    let role = Role::from_args(&mut args);
    args.finish();
    let work = |mut ep: Endpoint| {
        ep.patience = patience;
        end(&ep, &run, &chosen, no_skip)
    };
    let status = endpoint::run(&role, &device, wait, work).unwrap_or_else(|error| {
        eprintln!("mroce-verify: {error}");
        1
    });
    std::process::exit(status);
}
