# SPDX-License-Identifier: GPL-2.0
#
# metaroce: see README.md. Everything is built in a Debian 13 root that qemu-test/build-root
# makes with apt and debootstrap; caches lie in $(METAROCE_CACHE), outside of this folder.

KERNEL ?= stock
METAROCE_CACHE ?= /var/cache/metaroce
export METAROCE_CACHE

.PHONY: module
# Compiles the module for one kernel kind (KERNEL=stock|native|native-debug).
module:
	@qemu-test/module $(KERNEL) $(if $(CLIPPY),CLIPPY=1)
