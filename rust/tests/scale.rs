// SPDX-License-Identifier: GPL-2.0

//! The core at 400 Gb/s, on many endpoints at once: a small part of what `make sim-full` runs.

#![forbid(unsafe_code)]

use metaroce_sim::scale::{run_file, Options};

fn run(name: &str, text: &str, set: &[(&str, &str)]) {
    let options = Options {
        quiet: true,
        set: (set.iter())
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect(),
        ..Options::default()
    };
    match run_file(name, text, &options) {
        Ok(rows) => assert!(!rows.is_empty()),
        Err(e) => panic!("{name}: {e}"),
    }
}

#[test]
fn all_transports_and_kinds_of_traffic() {
    run("small", include_str!("../sim/runs/small.toml"), &[]);
}

/// The same seed gives the same packets, another one gives others.
#[test]
fn repeats_exactly() {
    let text = include_str!("../sim/runs/small.toml");
    let one = |seed: &str| {
        let options = Options {
            quiet: true,
            set: [
                ("run.seed", seed),
                ("transport.kind", "metaroce,roce"),
                ("traffic.kind", "incast,permutation"),
                ("fabric.loss", "1%"),
            ]
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect(),
            ..Options::default()
        };
        let text = &text[..text.find("[[expect]]").unwrap_or(text.len())];
        let rows = run_file("again", text, &options).expect("it runs");
        let columns = ["time_us", "packets", "resent", "events", "queue_kb"];
        let values = rows
            .iter()
            .flat_map(|r| columns.map(|c| r.number(c).to_bits()));
        values.collect::<Vec<u64>>()
    };
    assert_eq!(one("1"), one("1"));
    assert_ne!(one("1"), one("2"));
}
