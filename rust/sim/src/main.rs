// SPDX-License-Identifier: GPL-2.0

//! `metaroce-sim`: see [`metaroce_sim::scale`].

#![forbid(unsafe_code)]

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    std::process::exit(metaroce_sim::scale::main(&args));
}
