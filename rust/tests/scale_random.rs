// SPDX-License-Identifier: GPL-2.0

//! Random fabrics, traffic and faults, with the real core on every endpoint. The simulator
//! checks at each step that messages are received once and complete in order, that nothing is
//! written to a complete message and that held packets stay within their limit; here: that all
//! finite work ends soon after the weather, and that equal flows get equal parts.
//!
//! PACKETS=n simulates at least n packets (usually a million), SEED=n runs one seed.

#![forbid(unsafe_code)]

use metaroce_sim::scale::{run_file, Options, Row};
use metaroce_sim::Rng;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|v| v.parse().ok())
}

/// Runs that take about as many packets as asked for; the seeds are printed.
fn until(share: u64, run: impl Fn(u64) -> u64) {
    if let Some(seed) = number("SEED") {
        run(seed);
        return;
    }
    let wanted = number("PACKETS").unwrap_or(1_000_000) * share / 100;
    let (mut packets, mut seed) = (0, 0);
    while packets < wanted {
        seed += 1;
        println!("seed {seed}, {packets} packets so far");
        packets += run(seed);
    }
    println!("{packets} packets, seeds 1 to {seed}");
}

fn run(text: &str) -> Row {
    let options = Options {
        quiet: true,
        ..Options::default()
    };
    let rows = run_file("random", text, &options).expect("it runs");
    rows.into_iter().next().expect("one case")
}

/// Everything may break as long as a spine lives; after 2 ms all is well again.
fn weather(rng: &mut Rng, hosts: u64, spines: u64, leaves: u64) -> String {
    let mut text = String::new();
    let n = rng.below(6);
    for _ in 0..n {
        let at = rng.below(1500);
        let link = match rng.below(4) {
            0 => format!("host {}", rng.below(hosts)),
            1 if spines > 1 => format!("spine {}", 1 + rng.below(spines - 1)),
            _ => format!("leaf {} spine {}", rng.below(leaves), rng.below(spines)),
        };
        let spine_0 = link.ends_with("spine 0");
        let change = match rng.below(4) {
            0 if !link.starts_with("host") && !spine_0 => "up = false".into(),
            1 => format!("rate = \"{}G\"", 10 + rng.below(400)),
            _ => format!("loss = \"{}%\"", [1, 10, 30][rng.below(3) as usize]),
        };
        text += &format!("[[fault]]\nat = \"{at}us\"\nlink = \"{link}\"\n{change}\n");
    }
    for heal in ["up = true", "loss = 0", "rate = \"400G\""] {
        text += &format!("[[fault]]\nat = \"2ms\"\nlink = \"all\"\n{heal}\n");
    }
    text
}

fn storm(seed: u64) -> u64 {
    let mut rng = Rng::new(seed ^ 0x5ca1e);
    let mut pick = |list: &[&str]| list[rng.below(list.len() as u64) as usize].to_string();
    let leaf = pick(&["2", "4", "8"]);
    let leaves = pick(&["2", "3"]);
    let per_leaf: u64 = leaf.parse().expect("a number");
    let hosts = per_leaf * leaves.parse::<u64>().expect("a number");
    let spines = pick(&["1", "2", "4", "16"]);
    let text = format!(
        "[fabric]\nhosts = {hosts}\nhosts_per_leaf = {leaf}\nspines = {spines}\nbuffer = \"{}\"\n\
         mark_min = \"{}\"\nloss = \"{}\"\ndelay = {}\n\
         [transport]\npaths = {}\nmtu = {}\nhint = {}\nbatch = {}\npull = {}\nqps = {}\nrecords = {}\n\
         margin = {}\n\
         [traffic]\nkind = {}\nsize = {}\nrepeat = {}\nsenders = {}\n\
         [run]\nseed = {seed}\nlimit = \"4s\"\n",
        pick(&["64K", "400K", "4M"]),
        pick(&["0", "50K", "200K"]),
        pick(&["0", "0", "0.1%", "3%"]),
        pick(&["\"100ns\"", "\"600ns\"", "\"10us\""]),
        pick(&["1", "4", "16", "16", "64"]),
        pick(&["1500", "4200", "9000"]),
        pick(&["true", "false"]),
        pick(&["\"1ns\"", "\"500ns\"", "\"10us\""]),
        pick(&["0", "64K"]),
        pick(&["1", "3"]),
        pick(&["16", "64", "256"]),
        pick(&["\"50us\"", "\"1ms\""]),
        pick(&["\"ring\"", "\"all-to-all\"", "\"incast\""]),
        pick(&["10K", "1M", "4M"]),
        pick(&["1", "4"]),
        hosts - 1,
    );
    let spines = spines.parse().expect("a number");
    let text = text + &weather(&mut rng, hosts, spines, hosts / per_leaf);
    let row = run(&text);
    assert!(row.number("ok") == 1.0, "seed {seed}: {row:?}\n{text}");
    row.number("packets") as u64
}

#[test]
fn storms() {
    until(70, storm);
}

/// Equal senders over one link get equal parts, whatever the receiver tells them.
fn fair(seed: u64) -> u64 {
    let mut rng = Rng::new(seed ^ 0xfa1);
    let senders = 2 + rng.below(14);
    let hint = rng.below(2) == 0;
    let marks = rng.below(3) != 0;
    let text = format!(
        "[fabric]\nhosts = {}\nhosts_per_leaf = 8\nspines = 8\nmark_min = {}\n\
         [transport]\nhint = {hint}\n\
         [traffic]\nkind = \"incast\"\nsize = 2M\nsenders = {senders}\n\
         [run]\nseed = {seed}\nlimit = \"100ms\"\n",
        senders + 1,
        if marks { "200K" } else { "0" },
    );
    let row = run(&text);
    let what = format!("seed {seed}, {senders} senders, hint {hint}, marks {marks}: {row:?}");
    assert!(row.number("ok") == 1.0, "{what}");
    // Their first bytes meet a queue that overflows; the rest makes up for it.
    let spread = row.number("max_us") / row.number("p50_us");
    assert!(
        spread < 1.5,
        "the last one took {spread} times as long. {what}"
    );
    // With neither marks nor shares the last flow may be alone for a while.
    let least = if hint || marks { 0.85 } else { 0.75 };
    assert!(row.number("of_line") > least, "{what}");
    row.number("packets") as u64
}

#[test]
fn equal_senders_get_equal_parts() {
    until(30, fair);
}
