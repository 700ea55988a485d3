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

/// Small and slow, as the module is measured in network namespaces; and what the simulator tells
/// of a run is compared with such a measurement.
#[test]
fn scenarios_of_the_module() {
    let text = include_str!("../sim/runs/module.toml");
    let set = [("run.seed", "1"), ("run.warm", "1s"), ("run.time", "2s")];
    let options = |against| Options {
        quiet: true,
        set: set.map(|(k, v)| (k.into(), v.into())).to_vec(),
        against,
        ..Options::default()
    };
    let rows = run_file("module", text, &options(None)).expect("it runs");
    let of = |name: &str| {
        let row = rows.iter().find(|r| r.get("scenario") == Some(name));
        row.expect("a row").clone()
    };
    // Marks where switches mark, losses where there are any, shares where they are told.
    assert_eq!(of("drop-tail").number("marked_part"), 0.0);
    assert!(of("red-ecn").number("marked_part") > 0.01);
    assert_eq!(of("red-ecn").number("resent_part"), 0.0);
    let lost = of("loss-5").number("resent_part");
    assert!((0.035..0.075).contains(&lost), "{lost} of 0.05");
    let share = of("incast-4-hint").number("share_mbit");
    assert!((9.0..11.0).contains(&share), "{share} of 40 Mbit/s");
    assert!(of("incast-4-hint").number("jain") > 0.99);
    let slow = of("spines-40-20").number("faulty_part");
    assert!((0.28..0.38).contains(&slow), "{slow} of a third");
    for r in &rows {
        assert!(r.number("window_kb") > 20.0 && r.number("inflight_kb") > 10.0);
        assert!(r.number("srtt_us") > 10_000.0);
    }

    // A module that does just the same agrees; one that is twice as fast does not.
    let columns = [
        "scenario",
        "mbit_s",
        "jain",
        "window_kb",
        "inflight_kb",
        "srtt_us",
        "share_mbit",
        "resent_part",
        "spurious_part",
        "marked_part",
        "cuts_s",
        "faulty_part",
    ];
    let path = std::env::temp_dir().join(format!("metaroce-module-{}.csv", std::process::id()));
    for (rate, agrees) in [(1.0, true), (2.0, false)] {
        let mut table = columns.join(",") + "\n";
        for r in &rows {
            let cells = columns.map(|c| match c {
                "mbit_s" => (r.number(c) * rate).to_string(),
                _ => r.get(c).expect("a column").to_string(),
            });
            table += &(cells.join(",") + "\n");
        }
        std::fs::write(&path, table).expect("the table is written");
        let result = run_file("module", text, &options(Some(path.clone())));
        assert_eq!(result.is_ok(), agrees, "{result:?}");
    }
    std::fs::remove_file(&path).expect("it was there");
}

/// Hosts that stand still for longer than a queue lasts still take its losses for what they are.
#[test]
fn halts_do_not_hide_full_queues() {
    let text = include_str!("../sim/runs/module.toml");
    let set = [
        ("run.seed", "1"),
        ("run.time", "5s"),
        ("transport.stall", "100ms"),
    ];
    let options = Options {
        quiet: true,
        set: set.map(|(k, v)| (k.into(), v.into())).to_vec(),
        ..Options::default()
    };
    let rows = run_file("halts", text, &options).expect("it runs");
    for name in ["drop-tail", "two-drop-tail", "incast-4"] {
        let row = rows.iter().find(|r| r.get("scenario") == Some(name));
        let resent = row.expect("a row").number("resent_part");
        assert!(resent < 0.05, "{name}: {resent} is sent again");
    }
}
