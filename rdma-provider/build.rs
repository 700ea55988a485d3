// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB

//! Makes the bindings, so that no layout is written by hand:
//!
//! - `verbs.rs` from the provider header of rdma-core (`infiniband/driver.h`), which Debian does
//!   not install: it is taken from the source archive `rdma-core_*.orig.tar.*` in `/usr/src`, or
//!   from the unpacked source tree named by `RDMA_CORE_SOURCE`;
//! - `abi.rs` from `uapi/rdma/metaroce-abi.h`.
//!
//! It needs the programs `bindgen`, `tar` and `python3`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};

fn die(message: &str) -> ! {
    eprintln!("metaroce provider: {message}");
    exit(1);
}

/// The value of `variable`, which cargo sets for every build script.
fn cargo(variable: &str) -> PathBuf {
    PathBuf::from(env::var_os(variable).unwrap_or_else(|| die(&format!("{variable} is not set"))))
}

fn run(command: &mut Command) {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => die(&format!("{name} failed: {status}")),
        Err(error) => die(&format!("cannot run {name}: {error}; install it")),
    }
}

fn write(path: &Path, text: &[u8]) {
    if let Err(error) = fs::write(path, text) {
        die(&format!("cannot write {}: {error}", path.display()));
    }
}

fn link(target: &Path, name: &Path) {
    let _ = fs::remove_file(name);
    if let Err(error) = std::os::unix::fs::symlink(target, name) {
        die(&format!("cannot link {}: {error}", name.display()));
    }
}

/// The source tree of rdma-core.
fn source(out: &Path) -> PathBuf {
    if let Some(tree) = env::var_os("RDMA_CORE_SOURCE") {
        return PathBuf::from(tree);
    }
    let archive = fs::read_dir("/usr/src").ok().and_then(|entries| {
        entries.flatten().map(|entry| entry.path()).find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            name.starts_with("rdma-core_") && name.contains(".orig.tar.")
        })
    });
    let archive = archive.unwrap_or_else(|| {
        die("no rdma-core_*.orig.tar.* in /usr/src: run there 'apt-get source --download-only rdma-core', or set RDMA_CORE_SOURCE")
    });
    println!("cargo::rerun-if-changed={}", archive.display());
    let tree = out.join("rdma-core");
    let _ = fs::remove_dir_all(&tree);
    if let Err(error) = fs::create_dir_all(&tree) {
        die(&format!("cannot make {}: {error}", tree.display()));
    }
    run(Command::new("tar")
        .arg("-xf")
        .arg(&archive)
        .arg("-C")
        .arg(&tree)
        .args(["--strip-components=1", "--no-same-owner"]));
    tree
}

/// The number in `set(IBVERBS_PABI_VERSION "34")`: the private ABI that the header describes.
fn private_abi(tree: &Path) -> String {
    let file = tree.join("CMakeLists.txt");
    let text = fs::read_to_string(&file)
        .unwrap_or_else(|error| die(&format!("cannot read {}: {error}", file.display())));
    text.lines()
        .find_map(|line| line.trim().strip_prefix("set(IBVERBS_PABI_VERSION \"")?.strip_suffix("\")"))
        .map(str::to_owned)
        .unwrap_or_else(|| die("rdma-core's CMakeLists.txt names no IBVERBS_PABI_VERSION"))
}

fn main() {
    let out = cargo("OUT_DIR");
    let here = cargo("CARGO_MANIFEST_DIR");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/ffi/wrapper.h");
    println!("cargo::rerun-if-env-changed=RDMA_CORE_SOURCE");

    let tree = source(&out);
    let abi = private_abi(&tree);
    if abi != "34" {
        die(&format!("rdma-core's private provider ABI is {abi}; this plugin is written for 34"));
    }

    // The include tree that rdma-core's own build makes.
    let include = out.join("include");
    let _ = fs::remove_dir_all(&include);
    if let Err(error) = fs::create_dir_all(include.join("kernel-abi")) {
        die(&format!("cannot make {}: {error}", include.display()));
    }
    link(&tree.join("libibverbs"), &include.join("infiniband"));
    link(&tree.join("kernel-headers/rdma"), &include.join("rdma"));
    link(&tree.join("ccan"), &include.join("ccan"));
    link(&tree.join("util"), &include.join("util"));
    write(&include.join("config.h"), b"");
    run(Command::new("python3")
        .arg(tree.join("buildlib/make_abi_structs.py"))
        .arg(tree.join("kernel-headers/rdma/ib_user_verbs.h"))
        .arg(include.join("kernel-abi/ib_user_verbs.h")));

    let common = [
        "--use-core",
        "--rust-target=1.82",
        "--rust-edition=2021",
        "--no-doc-comments",
        "--no-prepend-enum-name",
        "--merge-extern-blocks",
        "--disable-header-comment",
    ];
    run(Command::new("bindgen")
        .args(common)
        .args(["--allowlist-type", "(verbs|ibv|ib_uverbs)_.*"])
        .args(["--allowlist-function", "_?(verbs|ibv_cmd)_.*|__verbs_log"])
        .args(["--allowlist-function", "m(map|unmap|advise)|ioctl|write|syscall|calloc|free|abort|clock_gettime|__errno_location|dprintf|snprintf"])
        .args(["--allowlist-var", "(IBV|VERBS|IB_USER_VERBS|IB_UVERBS|UVERBS_ATTR)_.*|E[A-Z0-9]+"])
        .args(["--allowlist-var", "(PROT|MAP|MADV|FUTEX)_.*|CLOCK_MONOTONIC|SYS_futex|METAROCE_.*"])
        .arg("--output")
        .arg(out.join("verbs.rs"))
        .arg(here.join("src/ffi/wrapper.h"))
        .arg("--")
        .arg(format!("-I{}", include.display()))
        .args(["-D_GNU_SOURCE", "-w"])
        .arg(format!("-DIBVERBS_PABI_VERSION={abi}")));

    let header = here.join("../uapi/rdma/metaroce-abi.h");
    println!("cargo::rerun-if-changed={}", header.display());
    run(Command::new("bindgen")
        .args(common)
        .args(["--with-derive-default", "--allowlist-file", ".*/metaroce-abi\\.h"])
        .arg("--output")
        .arg(out.join("abi.rs"))
        .arg(&header));

    // Programs link to it by this name; what it exports is in metaroce.map (see `link-cc`).
    println!("cargo::rerun-if-changed=metaroce.map");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmetaroce.so.1");
    println!("cargo::rustc-link-lib=dylib=ibverbs");
    println!("cargo::rustc-link-lib=dylib=c");
}
