// SPDX-License-Identifier: GPL-2.0
#![forbid(unsafe_code)]
fn main() {}
