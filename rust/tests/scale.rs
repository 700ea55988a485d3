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

/// A controller is chosen by its name: one that never cuts and never grows.
#[test]
fn with_a_fixed_window() {
    let text = include_str!("../sim/runs/small.toml");
    let options = Options {
        quiet: true,
        set: [
            ("transport.kind", "metaroce"),
            ("transport.controller", "fixed,aimd"),
            ("traffic.kind", "permutation"),
            ("fabric.mark_min", "20K"),
        ]
        .iter()
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect(),
        ..Options::default()
    };
    let text = &text[..text.find("[[expect]]").unwrap_or(text.len())];
    let rows = run_file("fixed", text, &options).expect("it runs");
    let of = |name: &str| {
        let row = rows.iter().find(|r| r.get("controller") == Some(name));
        row.expect("a row").clone()
    };
    let (fixed, aimd) = (of("fixed"), of("aimd"));
    for r in [&fixed, &aimd] {
        assert_eq!(r.number("ok"), 1.0);
        assert!(r.number("of_line") > 0.9, "{r:?}");
        assert!(r.number("marked") > 0.0, "{r:?}");
    }
    assert_eq!(fixed.number("cuts"), 0.0);
    assert!(aimd.number("cuts") > 0.0);
    let unknown = Options {
        set: vec![("transport.controller".into(), "cubic".into())],
        ..options
    };
    let e = run_file("unknown", text, &unknown).expect_err("there is no such controller");
    assert!(e.contains("cubic"), "{e}");
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
