//! Work in a process of its own, which dies at any moment, again and again.

use std::path::Path;
use std::process::Command;

/// What a child process does, where it keeps its state, and at which moment it dies.
const WORK: &str = "KILLED_TEST_WORK";
const FOLDER: &str = "KILLED_TEST_FOLDER";
const DIES: &str = "KILLED_TEST_DIES";

/// What the test of a child process does; without its variables there is nothing to do.
pub(crate) fn as_a_child(work: impl FnOnce(&str, &Path, Option<usize>) -> String) {
    let (Ok(name), Some(folder)) = (std::env::var(WORK), std::env::var_os(FOLDER)) else {
        return;
    };
    let folder = Path::new(&folder);
    let dies = std::env::var(DIES).ok().map(|dies| dies.parse().unwrap());
    let said = work(&name, folder, dies);
    std::fs::write(folder.join("said"), said).unwrap();
}

/// Does the work in a process that runs this test alone; `None` where it died.
pub(crate) fn child(test: &str, name: &str, folder: &Path, dies: Option<usize>) -> Option<String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(WORK, name)
        .env(FOLDER, folder);
    if let Some(dies) = dies {
        command.env(DIES, dies.to_string());
    }
    let output = command.output().unwrap();
    let said = std::fs::read_to_string(folder.join("said")).ok();
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(!failed.contains("panicked"), "{name}: {failed}");
    assert!(
        dies.is_some() || output.status.success(),
        "{name}: {failed}"
    );
    assert_eq!(said.is_some(), output.status.success(), "{name}: {failed}");
    said
}

/// What the work says after lives of these lengths, and how often it died before.
pub(crate) fn lives_until_said(
    test: &str,
    name: &str,
    folder: &Path,
    lives: impl IntoIterator<Item = usize>,
) -> (String, usize) {
    // A life may be too short to come from one checkpoint to the next.
    for (deaths, dies) in lives.into_iter().take(100).enumerate() {
        if let Some(said) = child(test, name, folder, Some(dies)) {
            return (said, deaths);
        }
    }
    panic!("{name}: no progress");
}
