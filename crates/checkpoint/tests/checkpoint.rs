//! What is saved comes back; what is broken is refused, with a name.

use std::fs;
use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};
use trainyard_checkpoint::{Checkpoint, CheckpointError, TrainState, latest, leftovers, save};
use trainyard_nn::{Builder, Init, NnError, Parameter, weights::WeightsError};

fn model(seed: u64, width: usize, kind: Kind) -> Vec<Parameter> {
    let builder = Builder::new(seed).kind(kind).at("model");
    vec![
        builder
            .parameter("weight", &[3, width], Init::with_std(1.0))
            .unwrap(),
        builder
            .parameter("bias", &[width], Init::with_std(1.0))
            .unwrap(),
    ]
}

fn optimizer() -> Vec<(String, Tensor)> {
    vec![
        (
            "exp_avg.model.weight".into(),
            Tensor::from_slice(&[0.25f64, -1.0, 3.5]),
        ),
        ("step.model.weight".into(), Tensor::from(7.0f32)),
        (
            "exp_avg.model.bias".into(),
            Tensor::from_slice(&[1.0f32, 2.0]).to_kind(Kind::BFloat16),
        ),
    ]
}

fn state(step: u64) -> TrainState {
    TrainState {
        step,
        samples_seen: step * 8,
        seed: 3,
        world_size: 2,
        config: "[training]\nsteps = 20\n".into(),
        schedule: serde_json::json!({ "warmup_steps": 2 }),
    }
}

fn save_step(folder: &Path, step: u64, keep: usize) -> PathBuf {
    save(
        folder,
        &model(step, 4, Kind::Float),
        &optimizer(),
        &state(step),
        keep,
    )
    .unwrap()
}

fn steps_in(folder: &Path) -> Vec<String> {
    let items = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = items
        .map(|item| item.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn everything_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_step(folder.path(), 12, 0);
    assert_eq!(path, folder.path().join("step-12"));
    assert_eq!(
        steps_in(&path),
        ["model.safetensors", "optimizer.safetensors", "state.json"]
    );

    let checkpoint = Checkpoint::open(latest(folder.path()).unwrap().unwrap()).unwrap();
    assert_eq!(checkpoint.path(), path);
    assert_eq!(checkpoint.state(), &state(12));
    let (saved, loaded) = (model(12, 4, Kind::Float), model(99, 4, Kind::Float));
    checkpoint.load_model(&loaded).unwrap();
    for (saved, loaded) in saved.iter().zip(&loaded) {
        assert!(saved.tensor().equal(loaded.tensor()), "{}", saved.name());
    }
    let restored = checkpoint.load_optimizer().unwrap();
    for ((name, tensor), (found, restored)) in optimizer().iter().zip(&restored) {
        assert_eq!(name, found);
        assert_eq!(tensor.kind(), restored.kind());
        assert_eq!(tensor.size(), restored.size());
        assert!(tensor.equal(restored), "{name}");
    }
}

#[test]
fn an_optimizer_without_state_is_saved_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(folder.path(), &model(1, 4, Kind::Float), &[], &state(1), 0).unwrap();
    let checkpoint = Checkpoint::open(path).unwrap();
    assert!(checkpoint.load_optimizer().unwrap().is_empty());
}

#[test]
fn a_torn_write_is_ignored_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let whole = save_step(folder.path(), 10, 0);
    let torn = folder.path().join("step-20.partial");
    fs::create_dir(&torn).unwrap();
    fs::write(torn.join("model.safetensors"), b"half").unwrap();
    // A folder that lost a file is no checkpoint either.
    let robbed = save_step(folder.path(), 30, 0);
    fs::remove_file(robbed.join("state.json")).unwrap();

    assert_eq!(latest(folder.path()).unwrap(), Some(whole));
    assert_eq!(
        leftovers(folder.path()).unwrap(),
        [torn.clone(), robbed.clone()]
    );

    // Writing those steps again replaces what was left.
    assert_eq!(
        save_step(folder.path(), 20, 0),
        folder.path().join("step-20")
    );
    assert_eq!(save_step(folder.path(), 30, 0), robbed);
    assert_eq!(steps_in(folder.path()), ["step-10", "step-20", "step-30"]);
    assert_eq!(latest(folder.path()).unwrap(), Some(robbed));
}

#[test]
fn the_newest_is_found_by_number_and_older_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    for step in [8, 9, 10, 11] {
        save_step(folder.path(), step, 2);
    }
    assert_eq!(steps_in(folder.path()), ["step-10", "step-11"]);
    assert!(latest(folder.path()).unwrap().unwrap().ends_with("step-11"));
}

#[test]
fn a_failed_save_deletes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    save_step(folder.path(), 1, 1);
    let unsaveable = vec![("seen".to_owned(), Tensor::from_slice(&[true]))];
    let refused = save(
        folder.path(),
        &model(2, 4, Kind::Float),
        &unsaveable,
        &state(2),
        1,
    );
    assert!(matches!(refused, Err(CheckpointError::Kind { name, .. }) if name == "seen"));
    assert!(latest(folder.path()).unwrap().unwrap().ends_with("step-1"));
}

#[test]
fn another_model_is_refused_by_tensor_and_file() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(save_step(folder.path(), 1, 0)).unwrap();
    let refuse = |model: Vec<Parameter>| {
        let before: Vec<Tensor> = model.iter().map(|p| p.tensor().copy()).collect();
        let error = checkpoint.load_model(&model).unwrap_err();
        for (parameter, before) in model.iter().zip(&before) {
            assert!(parameter.tensor().equal(before), "changed {parameter:?}");
        }
        let text = error.to_string();
        assert!(text.contains("step-1/model.safetensors"), "{text}");
        match error {
            CheckpointError::Tensors(NnError::Weights(error)) => *error,
            other => panic!("{other}"),
        }
    };
    let shape = refuse(model(2, 5, Kind::Float));
    assert!(matches!(&shape, WeightsError::Shape { name, .. } if name == "model.weight"));
    let kind = refuse(model(2, 4, Kind::Double));
    assert!(matches!(&kind, WeightsError::Kind { name, .. } if name == "model.weight"));
    let names = refuse(model(2, 4, Kind::Float)[..1].to_vec());
    assert!(
        matches!(&names, WeightsError::Names { unexpected, .. } if unexpected[0] == "model.bias")
    );
}

#[test]
fn an_optimizer_file_of_another_save_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_step(folder.path(), 1, 0);
    let other = save(folder.path(), &model(1, 4, Kind::Float), &[], &state(2), 0).unwrap();
    fs::copy(
        other.join("optimizer.safetensors"),
        path.join("optimizer.safetensors"),
    )
    .unwrap();
    let error = Checkpoint::open(path)
        .unwrap()
        .load_optimizer()
        .unwrap_err();
    let text = error.to_string();
    assert!(text.contains("optimizer.safetensors") && text.contains("exp_avg.model.weight"));
}

#[test]
fn state_files_of_other_formats_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = save_step(folder.path(), 1, 0);
    let rewrite = |text: &str| {
        fs::write(path.join("state.json"), text).unwrap();
        Checkpoint::open(&path).unwrap_err()
    };
    let later = rewrite(r#"{ "version": 2, "shards": [] }"#);
    assert!(matches!(
        later,
        CheckpointError::Version {
            found: 2,
            known: 1,
            ..
        }
    ));
    assert!(matches!(rewrite("{ half"), CheckpointError::Format { .. }));
    assert!(matches!(
        rewrite(r#"{ "version": 1 }"#),
        CheckpointError::Format { .. }
    ));
}
