//! Arrows between the rooms of a crate point one way, as CONTRIBUTING says.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates whose rooms CONTRIBUTING lists in their order, each room using those before it.
fn orders(text: &str) -> Vec<(String, Vec<String>)> {
    let mut orders = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find("Rooms of `") {
        rest = &rest[start + "Rooms of `".len()..];
        let paragraph = rest.split("\n\n").next().unwrap_or_default();
        let mut names = paragraph.split('`').step_by(2).map(str::to_string);
        let krate = names.next().expect("a crate is named");
        // What stands between the names is skipped by the step.
        orders.push((krate, names.collect()));
    }
    orders
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

/// Code without comments and without tests: a test module with a body ends a file, one in a file of its
/// own does not.
fn code(text: &str) -> String {
    let tests = "#[cfg(test)]\nmod tests {";
    let text = text.split(tests).next().unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The names after `crate::`, of a group all.
fn used(code: &str) -> BTreeSet<String> {
    let is_name = |c: &char| c.is_alphanumeric() || *c == '_';
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| is_name(&c) || c == '$') {
            continue;
        }
        let after = &code[at + "crate::".len()..];
        match after.strip_prefix('{') {
            None => {
                names.insert(after.chars().take_while(is_name).collect());
            }
            Some(group) => {
                let group = group.split(';').next().unwrap_or_default();
                let mut depth = 0;
                let mut name = String::new();
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => {
                            names.insert(std::mem::take(&mut name));
                        }
                        c if depth == 0 && !c.is_whitespace() => name.push(c),
                        _ => {}
                    }
                }
                names.insert(name);
            }
        }
    }
    let first = |name: String| name.split("::").next().unwrap_or_default().to_string();
    names.into_iter().map(first).collect()
}

/// Which room each name of the crate's root comes from.
fn flat_names(lib: &str, rooms: &[String]) -> HashMap<String, String> {
    let mut of = HashMap::new();
    for export in code(lib).split("pub use ").skip(1) {
        let export = export.split(';').next().unwrap_or_default();
        let (path, names) = match export.split_once('{') {
            Some((path, names)) => (path, names),
            None => export.rsplit_once("::").unwrap_or((export, "")),
        };
        let room = path.split("::").next().unwrap_or_default();
        if !rooms.iter().any(|known| known == room) {
            continue;
        }
        for name in names.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
            // A function may have the name of its file.
            if !name.is_empty() && !rooms.iter().any(|known| known == name) {
                of.insert(name.to_string(), room.to_string());
            }
        }
    }
    of
}

#[test]
fn a_room_uses_only_rooms_before_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let contributing = fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let orders = orders(&contributing);
    assert!(!orders.is_empty(), "CONTRIBUTING lists no rooms");
    let mut back = Vec::new();
    for (krate, rooms) in orders {
        let folder = root.join(&krate).join("src");
        let lib = fs::read_to_string(folder.join("lib.rs")).unwrap();
        let flat = flat_names(&lib, &rooms);
        let place = |room: &str| rooms.iter().position(|known| known == room);
        let mut files = Vec::new();
        sources(&folder, &mut files);
        let mut seen = BTreeSet::new();
        for file in files {
            let relative = file.strip_prefix(&folder).unwrap();
            let first = relative.components().next().unwrap();
            let room = first.as_os_str().to_str().unwrap();
            let room = room.strip_suffix(".rs").unwrap_or(room);
            if file.file_name().is_some_and(|name| name == "tests.rs") {
                continue;
            }
            let Some(at) = place(room) else { continue };
            seen.insert(room.to_string());
            for name in used(&code(&fs::read_to_string(&file).unwrap())) {
                let target = flat.get(&name).unwrap_or(&name);
                if place(target).is_some_and(|target| target > at) {
                    back.push(format!(
                        "{krate}/src/{}: {name} of {target}",
                        relative.display()
                    ));
                }
            }
        }
        assert_eq!(seen.len(), rooms.len(), "rooms of {krate}: {seen:?}");
    }
    assert!(
        back.is_empty(),
        "arrows that point back:\n{}",
        back.join("\n")
    );
}
