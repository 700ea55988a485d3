// SPDX-License-Identifier: GPL-2.0

//! What the fuzzer has found to reach different code, once more. `fuzz/` says how it works;
//! `make fuzz` looks for more.

#![forbid(unsafe_code)]

use metaroce_fuzz::{corpus, TARGETS};
use std::path::Path;

fn replay(name: &str) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    let inputs = corpus::read(&folder.join(format!("{name}.txt"))).expect("a corpus");
    assert!(inputs.len() > 10, "the corpus of {name} is empty");
    for i in &inputs {
        println!("{name}, input {}", corpus::to_hex(i));
        (target.run)(i);
    }
}

#[test]
fn wire() {
    replay("wire");
}

#[test]
fn core() {
    replay("core");
}
