# SPDX-License-Identifier: GPL-2.0
#
# metaroce: see README.md. Everything is built in a Debian 13 root that qemu-test/build-root
# makes with apt and debootstrap; it and all output lie in $(METAROCE_CACHE), outside of this
# folder.
#
#   make            module (for the stock kernel) and libibverbs plugin
#   make install    both, on this machine (KDIR=<prepared kernel tree> for another kernel)
#   make uninstall  takes them away again
#   make demo       two virtual machines, verified data over many paths, with and without loss
#   make test       what each change must pass; ends with "N passed, N failed"
#                   (qemu-test/suites --help lists more: loss, speed, perftest, fabric …)
#   make test-debug its suites on a kernel that checks itself (KASAN, lockdep, leaks), and faults
#   make test-core  unit tests and simulation of the protocol core
#   make fuzz       looks for inputs that break the parser or the core (TIME=seconds for each)
#   make coverage   lines of the core that its tests run
#   make sim        small simulation of many endpoints at 400 Gb/s (a part of test-core)
#   make sim-full   all of it: tables and plots against models of RoCEv2 and an ideal transport
#                   (about an hour; rust/sim/README.md)
#   make sim-random ten million packets of random fabrics, traffic and faults
#   make mutants    breaks one rule of the protocol at a time: a test has to notice
#   make lint       the linters, with which make test begins: rustfmt, clippy, shellcheck, unsafe…
#   make bench      metaroce, rdma_rxe and TCP side by side on the native kernel
#   make bench-full the same with more and longer rounds (about 50 minutes)
#   make bench-vm   the same, shorter, on the stock kernel in a virtual machine
#   make module     the module alone, quietly (KERNEL=stock|native|native-time|native-debug|debug|kcsan, CLIPPY=1)
#   make programs   the plugin and the programs of selftests/
#   make clean      removes what was built from this checkout (not the root and the trees)

KERNEL ?= stock
METAROCE_CACHE ?= /var/cache/metaroce
export METAROCE_CACHE KDIR KVER DESTDIR

.PHONY: all help module programs install uninstall demo test test-debug test-core sim sim-full sim-random mutants fuzz coverage lint bench bench-full bench-vm clean
.NOTPARALLEL:

all: module programs
	@echo ">> module and plugin are built; 'make install' puts them on this machine, 'make demo' shows them in two virtual ones"

module:
	@qemu-test/module $(KERNEL) $(if $(CLIPPY),CLIPPY=1) | sed 's/^/>> module: /; s,$$,/metaroce.ko,'

programs:
	@qemu-test/programs | sed 's/^/>> plugin and programs: /'

help:
	@sed -n "s,^#   make,  make,p" Makefile

install:
	@install/install

uninstall:
	@install/install --remove

demo:
	@qemu-test/suites demo

test:
	@qemu-test/suites test

test-debug:
	@qemu-test/suites debug

test-core:
	@qemu-test/core test

fuzz:
	@qemu-test/core fuzz $(or $(TIME),60)

coverage:
	@qemu-test/core coverage

sim:
	@qemu-test/core sim

sim-full:
	@qemu-test/core sim full

sim-random:
	@qemu-test/core random

mutants:
	@qemu-test/core mutants

lint:
	@qemu-test/core lint

bench:
	@qemu-test/suites bench

bench-full:
	@qemu-test/suites bench-full

bench-vm:
	@qemu-test/suites bench-vm

clean:
	@qemu-test/module --clean
