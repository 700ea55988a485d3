// SPDX-License-Identifier: GPL-2.0

//! metaroce-fuzz TARGET CORPUS [--time SECONDS] [--runs N] [--seed N] [--keep]
//!
//! Fuzzes a target for that long or so often, beginning with its corpus (a file; see
//! `corpus.rs`), and with --keep writes the smallest set of inputs back that passes all code
//! that was reached. An input that makes the target panic is printed; then the status is
//! not 0. metaroce-fuzz TARGET --input HEX runs one.

#![forbid(unsafe_code)]

use metaroce_fuzz::engine::{self, Limits};
use metaroce_fuzz::{corpus, coverage, TARGETS};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let Some(target) = TARGETS.into_iter().find(|t| t.name == name) else {
        eprintln!(
            "usage: metaroce-fuzz wire|core CORPUS [--time SECONDS] [--runs N] [--seed N] [--keep]"
        );
        return ExitCode::from(2);
    };
    let seed = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut limits = Limits {
        time: Duration::from_secs(60),
        runs: u64::MAX,
        seed: seed.map_or(1, |d| d.as_nanos() as u64),
    };
    let (mut path, mut keep) = (None, false);
    while let Some(a) = arguments.next() {
        let mut number = || arguments.next().and_then(|v| v.parse::<u64>().ok());
        let known = match a.as_str() {
            "--time" => number().map(|n| limits.time = Duration::from_secs(n)),
            "--runs" => number().map(|n| {
                limits.runs = n;
                limits.time = Duration::MAX;
            }),
            "--seed" => number().map(|n| limits.seed = n),
            "--keep" => {
                keep = true;
                Some(())
            }
            "--input" => {
                let hex = arguments.next().unwrap_or_default();
                let Some(input) = corpus::from_hex(&hex) else {
                    eprintln!("{hex:?} is not hex");
                    return ExitCode::from(2);
                };
                (target.run)(&input);
                return ExitCode::SUCCESS;
            }
            _ => {
                path = Some(PathBuf::from(a));
                Some(())
            }
        };
        if known.is_none() {
            eprintln!("metaroce-fuzz: a number is missing");
            return ExitCode::from(2);
        }
    }
    let path = path.unwrap_or_else(|| PathBuf::from(format!("corpus/{name}.txt")));
    let seeds = match corpus::read(&path) {
        Ok(seeds) => seeds,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(e) => {
            eprintln!("{}: {e}", path.display());
            return ExitCode::FAILURE;
        }
    };
    if coverage::edges() == 0 {
        eprintln!("metaroce-fuzz: the core is not instrumented (see qemu-test/core fuzz)");
        return ExitCode::FAILURE;
    }
    eprintln!("{name}: seed {}, {} inputs", limits.seed, seeds.len());
    engine::show_failing_input(target);
    let outcome = engine::fuzz(target, seeds, limits);
    println!(
        "{name}: {} runs, {} of {} edges of the core, {} inputs needed for them, nothing found",
        outcome.runs,
        outcome.edges,
        coverage::edges(),
        outcome.corpus.len()
    );
    if keep {
        if let Err(e) = corpus::write(&path, &outcome.corpus) {
            eprintln!("{}: {e}", path.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
