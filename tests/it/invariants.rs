//! What must not be there: absences that nobody can see in the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Every source file of a crate.
fn sources(of: &str) -> Vec<(PathBuf, String)> {
    let mut files = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(of)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                files.push((path, text));
            }
        }
    }
    assert!(!files.is_empty(), "no sources in {of}");
    files
}

#[track_caller]
fn check_absent(of: &str, words: &[&str]) {
    for (path, text) in sources(of) {
        for word in words {
            assert!(!text.contains(word), "{} says `{word}`", path.display());
        }
    }
}

/// A page that names a test which is not there proves nothing.
#[test]
fn every_test_that_the_guarantees_name_is_there() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guarantees.md");
    let page = fs::read_to_string(page).unwrap();
    let code: Vec<String> = ["tests/it", "outbox-core/src", "outbox-sqlx/src"]
        .into_iter()
        .flat_map(sources)
        .map(|(_, text)| text)
        .collect();
    let named: BTreeSet<&str> = page
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|quoted| quoted.contains("::") && !quoted.contains(['(', ' ']))
        .filter_map(|path| path.rsplit("::").next())
        .filter(|name| name.contains('_'))
        .collect();
    assert!(named.len() > 200, "{} tests are named", named.len());
    for name in named {
        let function = format!("fn {name}");
        assert!(
            code.iter().any(|text| text.contains(&function)),
            "no test {name}"
        );
    }
}

/// P13: every time in a row comes from the database.
#[test]
fn p13_no_crate_reads_the_wall_clock() {
    for of in ["outbox-core/src", "outbox-sqlx/src"] {
        check_absent(
            of,
            &[
                "SystemTime::now",
                "Utc::now",
                "OffsetDateTime::now",
                "now_v7",
            ],
        );
    }
}

/// Transactions' time would count a lease from before the wait for a lock.
#[test]
fn no_statement_uses_the_time_its_transaction_began() {
    check_absent(
        "outbox-sqlx/src",
        &[
            " now()",
            "(now()",
            "CURRENT_TIMESTAMP",
            "transaction_timestamp",
        ],
    );
}

#[test]
fn the_core_knows_no_sql_and_no_driver() {
    check_absent(
        "outbox-core/src",
        &["sqlx::", "INSERT INTO", "UPDATE outbox", "DELETE FROM"],
    );
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../outbox-core/Cargo.toml");
    assert!(!fs::read_to_string(manifest).unwrap().contains("sqlx"));
}

/// The derive depends on neither of the others: what it generates names them by path.
#[test]
fn the_derive_depends_on_neither_of_the_others() {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../outbox-derive/Cargo.toml");
    let manifest = fs::read_to_string(manifest).unwrap();
    let (_, dependencies) = manifest.split_once("[dependencies]").unwrap();
    let (dependencies, _) = dependencies.split_once("\n[").unwrap();
    assert!(!dependencies.contains("outbox"), "{dependencies}");
}
