//! The architecture page shows the crates as they are: its picture and its list agree with `cargo metadata`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

/// Every crate of the workspace with the crates of the workspace that it uses.
type Graph = BTreeMap<String, BTreeSet<String>>;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn workspace() -> Graph {
    let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ])
        .current_dir(repository())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    let metadata: Value = serde_json::from_slice(&output.stdout).expect(&error);
    let packages = metadata["packages"].as_array().unwrap();
    let name = |value: &Value| value["name"].as_str().unwrap().to_owned();
    let names: BTreeSet<String> = packages.iter().map(name).collect();
    let uses = |package: &Value| {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let compiled = dependencies.filter(|dependency| dependency["kind"] != "dev");
        compiled
            .map(name)
            .filter(|used| names.contains(used))
            .collect()
    };
    packages
        .iter()
        .map(|package| (name(package), uses(package)))
        .collect()
}

/// Everything that a crate uses, directly or through others.
fn reachable(graph: &Graph, from: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut todo = vec![from.to_owned()];
    while let Some(name) = todo.pop() {
        todo.extend(
            graph[&name]
                .iter()
                .filter(|used| found.insert((*used).clone()))
                .cloned(),
        );
    }
    found
}

/// The graph without the arrows that follow from others.
fn reduced(graph: &Graph) -> Graph {
    let direct = |uses: &BTreeSet<String>| {
        let indirect: BTreeSet<String> = uses
            .iter()
            .flat_map(|used| reachable(graph, used))
            .collect();
        uses - &indirect
    };
    graph
        .iter()
        .map(|(name, uses)| (name.clone(), direct(uses)))
        .collect()
}

/// The values of an attribute, in the order of the picture.
fn attribute<'a>(picture: &'a str, name: &str) -> Vec<&'a str> {
    let begins = format!(" {name}=\"");
    let values = picture.split(begins.as_str()).skip(1);
    values.filter_map(|rest| rest.split('"').next()).collect()
}

#[test]
fn the_picture_shows_every_crate_and_every_arrow() {
    let picture = fs::read_to_string(repository().join("docs/src/images/crates.svg")).unwrap();
    let mut drawn: Graph = attribute(&picture, "data-name")
        .into_iter()
        .map(|name| (name.to_owned(), BTreeSet::new()))
        .collect();
    let (from, to) = (
        attribute(&picture, "data-from"),
        attribute(&picture, "data-to"),
    );
    for (from, to) in from.into_iter().zip(to) {
        drawn
            .entry(from.to_owned())
            .or_default()
            .insert(to.to_owned());
    }
    assert_eq!(drawn, reduced(&workspace()), "run docs/crates.py");
}

#[test]
fn the_page_describes_every_crate() {
    let page = fs::read_to_string(repository().join("docs/src/architecture.md")).unwrap();
    let described: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|(name, _)| name)
        .collect();
    let graph = workspace();
    let crates: BTreeSet<&str> = graph
        .keys()
        .map(|name| name.strip_prefix("trainyard-").unwrap_or(name))
        .collect();
    assert_eq!(described, crates);
}
