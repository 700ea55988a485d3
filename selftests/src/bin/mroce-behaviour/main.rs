// SPDX-License-Identifier: GPL-2.0
//! mroce-behaviour: what must happen in the cases that users of software RDMA devices ran
//! into, one test for each. Two ends; a case that needs one only leaves the listening end idle.

#![forbid(unsafe_code)]

mod completions;
mod life;
mod receives;
mod setup;
mod states;

use selftests::args::{self, Args};
use selftests::endpoint::{Device, Endpoint, Role};
use selftests::ktap::{self, Ktap, Outcome, Stop};
use selftests::oob::Oob;
use std::time::{Duration, Instant};

const HELP: &str = "\
usage: mroce-behaviour --listen [ADDRESS:]PORT | --connect ADDRESS[:PORT] | --pair DEVICE[,DEVICE] [options] [CASE...]
       mroce-behaviour --list

Without a role, HOST=1 listens and any other HOST connects to the first of PEERS.

  --dev NAME --gid INDEX --ipv6   device and GID (defaults: RDMA_DEV, GID4 or GID6, or what fits)
  --netdev NAME      interface of the device, for cases that make the device anew (default NETDEV)
  --type NAME        its link type (default: rxe for devices named rxe..., otherwise metaroce)
  --rounds N         rounds of the cases that repeat (default 20)
  --wait N           seconds that one step may take (default 20)
  --seed N           source of random choices

CASE is a name or the beginning of one; the connecting end decides. Results are KTAP.
";

/// What a case may know.
pub struct Run {
    /// How to find the device.
    pub device: Device,
    /// Interface under it.
    pub netdev: Option<String>,
    /// Type for `rdma link add`.
    pub kind: String,
    /// Rounds of cases that repeat.
    pub rounds: u64,
    /// Source of random choices.
    pub seed: u64,
}

type Case = (&'static str, fn(&Run, &Endpoint) -> Outcome);

const CASES: &[Case] = &[
    ("case05_kill_in_mid_retransmission", life::kill_in_retransmission),
    ("case05_mmap_against_destroy", life::mmap_against_destroy),
    ("case07_thousands_closed_at_once", life::thousands_at_once),
    ("case08_bad_rkey", completions::bad_rkey),
    ("case08_refused_accesses", completions::refused_accesses),
    ("case08_local_faults", completions::local_faults),
    ("case08_receive_too_short", completions::receive_too_short),
    ("case09_post_in_error_state", completions::post_in_error),
    ("case09_post_after_unnoticed_error", completions::post_after_unnoticed_error),
    ("case09_post_refused", completions::post_refused),
    ("case10_rnr_timer", completions::rnr_timer),
    ("case10_rnr_retries_exhausted", completions::rnr_exhausted),
    ("case10_rnr_retry_forever", completions::rnr_forever),
    ("case12_sizes_around_the_mtu", completions::sizes),
    ("case13_write_with_immediate", completions::write_with_immediate),
    ("case16_abi_versions", setup::abi_versions),
    ("case16_renamed_device", setup::renamed_device),
    ("case17_memlock", setup::memlock),
    ("case18_every_gid", setup::every_gid),
    ("case19_attributes", setup::attributes),
    ("case20_transitions", states::transitions),
    ("case20_missing_attributes", states::missing_attributes),
    ("case20_bad_values", states::bad_values),
    ("case20_query_gives_back", states::query_gives_back),
    ("case20_reset_and_reconnect", states::reset_and_reconnect),
    ("case20_drain", states::drain),
    ("case20_either_order_of_start", states::either_order),
    ("case21_unsupported", setup::unsupported),
    ("case21_optional_access_flags", setup::optional_access),
    ("receive_slots", receives::slots),
    ("cq_overflow", completions::cq_overflow),
    ("retries_exhausted", completions::retries_exhausted),
    // The device goes away in these.
    ("case01_device_deleted", life::device_deleted),
    ("case18_ready_after_link_add", setup::ready_after_add),
];

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn end(mut ep: Endpoint, run: &Run, mask: u64) -> Result<i32, String> {
    let theirs = ep.oob().exchange(&[mask, run.rounds, run.seed]).map_err(text)?;
    let (mask, rounds, seed) = match (ep.leads, theirs.as_slice()) {
        (true, _) => (mask, run.rounds, run.seed),
        (false, [mask, rounds, seed]) => (*mask, *rounds, *seed),
        _ => return Err("the other end is another version of this program".into()),
    };
    let run =
        &Run { device: run.device.clone(), netdev: run.netdev.clone(), kind: run.kind.clone(), rounds, seed };
    let cases: Vec<&Case> =
        CASES.iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1).map(|(_, c)| c).collect();
    let mut ktap = ep.leads.then(|| Ktap::new(cases.len()));
    if ep.leads {
        ktap::note(&format!("device {}, seed {seed}, {rounds} rounds", ep.context.name));
    }
    let mut failed = false;
    for (name, case) in cases {
        // Each case has the device for itself.
        ep = ep.reopen(&run.device).map_err(|e| format!("before {name}: opening the device: {e}"))?;
        ep.barrier(name).map_err(text)?;
        let start = Instant::now();
        let mut outcome = case(run, &ep);
        let mine = match &outcome {
            Ok(()) => String::new(),
            Err(Stop::Skip(why)) => format!("skip:{why}"),
            Err(Stop::Fail(why)) => why.clone(),
        };
        let theirs = ep.oob().end_part(&mine).map_err(|e| format!("after {name}: {e}"))?;
        let only_noticed = matches!(&outcome, Err(Stop::Fail(why)) if why.contains("the other end stopped"));
        if let Some(why) = theirs.strip_prefix("skip:") {
            if outcome.is_ok() || only_noticed {
                outcome = Err(Stop::Skip(why.to_string()));
            }
        } else if !theirs.is_empty() {
            let own = if only_noticed { String::new() } else { mine };
            let side = if ep.leads { "listening" } else { "connecting" };
            outcome = Err(Stop::Fail(format!("{side} end: {theirs}\n{own}").trim().to_string()));
        }
        failed |= matches!(outcome, Err(Stop::Fail(_)));
        if let Some(ktap) = &mut ktap {
            ktap.report(name, start, &outcome);
        }
    }
    Ok(match ktap {
        Some(ktap) => ktap.finish(),
        None => i32::from(failed),
    })
}

fn main() {
    let mut args = Args::from_env();
    args.help_or_list(HELP, CASES.iter().map(|c| c.0));
    // Parts of cases that run as processes of their own.
    if args.flag("--child-orphan") {
        std::process::exit(life::child_orphan(args));
    }
    if args.flag("--child-open") {
        std::process::exit(setup::child_open(args));
    }
    if args.flag("--child-memlock") {
        std::process::exit(setup::child_memlock(args));
    }
    if args.flag("--child-many") {
        std::process::exit(life::child_many(args));
    }
    let device = Device::from_args(&mut args);
    let netdev = args.text("--netdev").or_else(|| args::env("NETDEV"));
    let name = device.name.clone().unwrap_or_default();
    let kind = args.text("--type").unwrap_or_else(|| {
        if name.starts_with("rxe") {
            "rxe".into()
        } else {
            "metaroce".to_string()
        }
    });
    let rounds = args.value("--rounds").unwrap_or(20);
    let seed = args.value("--seed").unwrap_or(u64::from(std::process::id()));
    let wait = Duration::from_secs(args.value("--wait").unwrap_or(20));
    let role = Role::from_args(&mut args);
    let mut mask = 0u64;
    while let Some(word) = args.positional() {
        let before = mask;
        for (i, case) in CASES.iter().enumerate() {
            if case.0.starts_with(&word) {
                mask |= 1 << i;
            }
        }
        if mask == before {
            args::usage::<()>(&format!("no case '{word}' (--list names them)"));
        }
    }
    args.finish();
    if mask == 0 {
        mask = (1 << CASES.len()) - 1;
    }
    let make = |device: &Device| Run {
        device: device.clone(),
        netdev: netdev.clone(),
        kind: kind.clone(),
        rounds,
        seed,
    };
    let one = |device: &Device, oob: Oob, leads: bool| {
        let ep = Endpoint::open(device, oob, leads, wait).map_err(|e| format!("opening the device: {e}"))?;
        end(ep, &make(device), mask)
    };
    let result = match &role {
        Role::Listen(addr) => Oob::listen(addr).map_err(text).and_then(|oob| one(&device, oob, false)),
        Role::Connect(addr) => {
            Oob::connect(addr, Duration::from_secs(60)).map_err(text).and_then(|oob| one(&device, oob, true))
        }
        Role::Pair(a, b) => Oob::pair().map_err(text).and_then(|(left, right)| {
            let (first, second) = (device.named(a), device.named(b));
            std::thread::scope(|scope| {
                let other = scope.spawn(|| one(&second, right, false));
                let mine = one(&first, left, true);
                let other = other.join().unwrap_or_else(|_| Err("the second end panicked".into()));
                mine.and_then(|a| other.map(|b| a.max(b)))
            })
        }),
    };
    std::process::exit(result.unwrap_or_else(|error| {
        eprintln!("mroce-behaviour: {error}");
        1
    }));
}
