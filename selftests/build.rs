// SPDX-License-Identifier: GPL-2.0
//! Makes the bindings: bindgen over wrapper.h, and a C object for the static inline
//! functions of verbs.h (ibv_post_send, ibv_poll_cq, ...), which no library exports.

use std::path::PathBuf;
use std::process::Command;

fn run(command: &mut Command, remedy: &str) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{command:?} ended with {status}: {remedy}"),
        Err(error) => panic!("{command:?} did not start ({error}): {remedy}"),
    }
}

fn main() {
    println!("cargo::rerun-if-changed=wrapper.h");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../rdma-provider/metarocedv.h");
    println!("cargo::rerun-if-changed=../uapi/rdma/metaroce-abi.h");
    println!("cargo::rerun-if-env-changed=BINDGEN");
    println!("cargo::rerun-if-env-changed=CC");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let bindgen = std::env::var("BINDGEN").unwrap_or_else(|_| "bindgen".into());
    let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let wrappers = out.join("wrappers.c");
    let mut command = Command::new(bindgen);
    command.arg("wrapper.h").arg("-o").arg(out.join("verbs.rs"));
    command.args(["--experimental", "--wrap-static-fns", "--wrap-static-fns-path"]).arg(&wrappers);
    command.args(["--rust-target", "1.85", "--default-enum-style", "consts"]);
    command.args(["--no-prepend-enum-name", "--with-derive-default", "--no-doc-comments"]);
    for function in [
        "_*ibv_.*",
        "mmap",
        "munmap",
        "memfd_create",
        "ftruncate",
        "madvise",
        "poll",
        "setns",
        "sched_yield",
        "setrlimit",
        "getrlimit",
        "getrusage",
        "fcntl",
        "socket",
        "bind",
        "send",
        "recv",
        "if_nametoindex",
        "ioctl",
        "write",
        "fork",
        "waitpid",
        "_exit",
        "dlopen",
        "dlsym",
    ] {
        command.args(["--allowlist-function", function]);
    }
    command.args([
        "--allowlist-type",
        "ibv_.*|sockaddr_ll|metaroce_(connection|controller|path|ordering|transition|qp_attr).*",
    ]);
    for constant in [
        "IBV_.*",
        "PROT_.*",
        "MAP_.*",
        "MFD_.*",
        "MADV_.*",
        "POLL.*",
        "CLONE_.*",
        "_*RLIMIT_.*",
        "RUSAGE_.*",
        "F_[GS]ETFL",
        "F_SETFD",
        "O_NONBLOCK",
        "E[A-Z0-9]+",
        "[AP]F_PACKET",
        "MSG_DONTWAIT",
        "RTLD_NOW",
        "METAROCE_.*",
    ] {
        command.args(["--allowlist-var", constant]);
    }
    // Extensions: the header of the plugin, and what it includes.
    let includes = ["-I../rdma-provider", "-I../uapi"];
    command.args(["--", "-D_GNU_SOURCE"]).args(includes);
    run(
        &mut command,
        "the programs need bindgen, libclang and libibverbs-dev (Debian: apt install bindgen libibverbs-dev)",
    );

    // The generated file includes "wrapper.h" by the path that bindgen was given.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let object = out.join("wrappers.o");
    let mut command = Command::new(cc);
    command
        .args(["-O2", "-w", "-D_GNU_SOURCE"])
        .args(includes)
        .arg("-I")
        .arg(&here)
        .arg("-c")
        .arg(&wrappers)
        .arg("-o")
        .arg(&object);
    run(&mut command, "a C compiler and libibverbs-dev are needed (CC names another compiler)");
    let archive = out.join("libverbs_wrappers.a");
    let _ = std::fs::remove_file(&archive);
    run(Command::new("ar").arg("crs").arg(&archive).arg(&object), "binutils is needed");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=verbs_wrappers");
    println!("cargo::rustc-link-lib=dylib=ibverbs");
}
