# Every target installs what it lacks by name, says what it does, and can be
# run again.

GO          ?= go
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
# runc_nocriu leaves checkpointing and its protobuf code out of libcontainer.
TAGS        := runc_nocriu
GOFLAGS_    := -tags $(TAGS)
# A static command starts faster, three times over for a first run, and runs on
# any distribution.
RELEASE     := -tags $(TAGS),netgo,osusergo -trimpath -ldflags '-s -w -extldflags "-static"'
# Made by the build, never committed: the init's binary and the default filter.
INIT        := jail/jailinit/jail-init
FILTER      := seccomp/program_ahead.go
MADE        := $(INIT) $(FILTER)
TEST_TIMEOUT ?= 8m

.PHONY: build run hostile test check bench bench-peers fuzz integration vagrant vagrant-box setup setup-test setup-bench install clean

build: setup $(MADE)
	$(GO) build $(RELEASE) -o bin/jail ./cmd/jail

$(INIT): jail/jailinit/src/init.c jail/jailinit/src/Makefile
	$(MAKE) --no-print-directory -C jail/jailinit/src

$(FILTER): $(filter-out $(FILTER),$(wildcard seccomp/*.go seccomp/gen/*.go))
	rm -f $@
	$(GO) run $(GOFLAGS_) ./seccomp/gen $@

# What building and running need, from Debian's packages.
setup:
	@./scripts/setup.sh build

setup-test:
	@./scripts/setup.sh build test

setup-bench:
	@./scripts/setup.sh build bench

run: build
	./bin/jail script --memory 128MiB --wall 10s --tools examples/shop/tools.yaml --report - examples/shop/report.py

# Each of these programs runs into a limit; the command line says which.
hostile: build
	./scripts/hostile.sh

# On this host, then what depends on cgroups in a machine with cgroup v2 only, in
# QEMU. JAIL_NO_VM=1 does without the machine, and so without cgroup v2.
test: setup-test check
	./scripts/test.sh $(TEST_TIMEOUT)

check: setup $(MADE)
	@echo "formatting, vet, staticcheck"
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo "run gofmt -w on these"; exit 1; }
	$(GO) mod verify >/dev/null
	$(GO) vet $(GOFLAGS_) ./...
	$(GO) run $(STATICCHECK) $(GOFLAGS_) ./...
	@if command -v vagrant >/dev/null 2>&1; then ./scripts/vagrant.sh validate; fi

bench: setup-bench build
	$(GO) build $(GOFLAGS_) -o build/bench ./integration/bench
	./build/bench -jail bin/jail $(BENCH_FLAGS)
	$(GO) test $(GOFLAGS_) -run '^$$' -bench . -benchtime 300ms -benchmem ./wire/... ./invoke ./seccomp ./cgroup

# This project beside others that start sandboxes. Flags go into PEERS_FLAGS:
# -quick, -only NAMES, -n ROUNDS.
bench-peers: build
	@./scripts/peers.sh
	$(GO) build $(GOFLAGS_) -o build/bench-peers ./integration/peers
	./build/bench-peers -json build/bench-peers.json -svg build/bench-peers.svg $(PEERS_FLAGS)

# The machine's tests alone, in full.
integration: setup $(MADE)
	./scripts/integration.sh

# The same in a Vagrant machine; vagrant-box makes a box where none can be had.
vagrant: setup $(MADE)
	./scripts/vagrant.sh

vagrant-box:
	./scripts/vagrant-box.sh

fuzz: setup $(MADE)
	./scripts/fuzz.sh

install: build
	install -D -m 0755 bin/jail $(DESTDIR)/usr/local/bin/jail

clean:
	rm -rf bin $(MADE)
