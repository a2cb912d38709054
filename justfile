# What there is
default:
    @{{just_executable()}} --list --unsorted

# Run every test, PostgreSQL included; arguments go to `cargo test`
test *arguments:
    scripts/test {{arguments}}

# Run everything that a change has to pass
ci:
    .ci/run

# Format the code
fmt:
    cargo fmt --all

# Lint the code
lint:
    cargo clippy --workspace --all-targets --all-features -- -D warnings

# Build the documentation and open it
doc:
    cargo doc --workspace --no-deps --all-features --open

# Run the integration tests on PostgreSQL 14 to 18, or on the versions given
test-versions *versions:
    scripts/test-postgres-versions {{versions}}

# Start a throwaway PostgreSQL and print its URL; Ctrl-D ends it
postgres:
    scripts/postgres

# Accept what the compile tests and snapshots say now; read the diff afterwards
bless:
    TRYBUILD=overwrite INSTA_UPDATE=always scripts/test

# Check licences, sources and advisories of the dependencies
deny:
    cargo deny check
