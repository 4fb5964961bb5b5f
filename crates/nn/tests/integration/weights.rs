//! Saving and loading safetensors files.

use std::fs;

use crate::presets::{peer_weights, tiny};
use tch::Kind;
use trainyard_arch::DecoderConfig;
use trainyard_nn::{
    Builder, Decoder, Device, Init, Module, NnError, Result, SimpleCnn,
    weights::{self, WeightsError},
};

fn equal(left: &dyn Module, right: &dyn Module) -> bool {
    let (left, right) = (left.parameters(), right.parameters());
    left.len() == right.len()
        && left
            .iter()
            .zip(&right)
            .all(|(a, b)| a.name() == b.name() && a.tensor().equal(b.tensor()))
}

fn weights_error(result: Result<()>) -> WeightsError {
    match result {
        Err(NnError::Weights(error)) => *error,
        other => panic!("unexpected result: {other:?}"),
    }
}

#[test]
fn saved_weights_are_loaded() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        let path = folder.path().join("weights.safetensors");
        let build = |seed| Decoder::build(&tiny(), 8, &Builder::new(seed).kind(kind));
        let (saved, loaded) = (build(1)?, build(2)?);
        assert!(!equal(&saved, &loaded));
        weights::save(&path, &saved)?;
        weights::load(&path, &loaded)?;
        assert!(equal(&saved, &loaded), "{kind:?}");
        assert!(loaded.parameters().iter().all(|p| p.is_trainable()));
    }
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 1, "no partial file is left");
    Ok(())
}

#[test]
fn tensors_larger_than_a_chunk_are_complete() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let build = |seed| Builder::new(seed).parameter("w", &[5_000_001], Init::fan_in(4));
    let (saved, loaded) = (build(1)?, build(2)?);
    weights::save(&path, &saved)?;
    weights::load(&path, &loaded)?;
    assert!(equal(&saved, &loaded));
    Ok(())
}

#[test]
fn errors_name_the_difference_and_nothing_is_changed() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let build =
        |config: &DecoderConfig, kind| Decoder::build(config, 8, &Builder::new(1).kind(kind));
    weights::save(&path, &build(&tiny(), Kind::Float)?)?;

    let shorter = DecoderConfig {
        num_hidden_layers: 3,
        ..tiny()
    };
    let error = weights_error(weights::load(&path, &build(&shorter, Kind::Float)?));
    assert!(
        matches!(&error, WeightsError::Names { missing, unexpected, .. }
            if missing.is_empty() && unexpected.len() == 9),
        "{error}"
    );

    let wider = DecoderConfig {
        intermediate_size: 400,
        ..tiny()
    };
    let model = build(&wider, Kind::Float)?;
    let error = weights_error(weights::load(&path, &model));
    assert!(
        matches!(&error, WeightsError::Shape { name, expected, found, .. }
            if name == "model.layers.0.mlp.gate_proj.weight"
                && expected == &[400, 128] && found == &[384, 128]),
        "{error}"
    );
    assert!(equal(&model, &build(&wider, Kind::Float)?));

    let error = weights_error(weights::load(&path, &build(&tiny(), Kind::Double)?));
    assert!(
        error.to_string().contains("is F32, expected F64"),
        "{error}"
    );
    Ok(())
}

#[test]
fn invalid_files_are_rejected() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let model = SimpleCnn::build(&Builder::new(1))?;
    let load = || weights_error(weights::load(&path, &model));
    assert!(matches!(load(), WeightsError::File { .. }));

    weights::save(&path, &model)?;
    let full = fs::read(&path).unwrap();
    for bytes in [
        &full[..full.len() - 1],
        &full[..100],
        &[0xff; 64],
        b"{}",
        b"",
    ] {
        fs::write(&path, bytes).unwrap();
        assert!(
            matches!(
                load(),
                WeightsError::File { .. } | WeightsError::Format { .. }
            ),
            "{} bytes",
            bytes.len()
        );
    }
    Ok(())
}

#[test]
fn a_meta_model_cannot_be_saved() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let model = Decoder::build(&tiny(), 8, &Builder::new(1).device(Device::Meta))?;
    assert!(weights::save(&path, &model).is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    Ok(())
}

#[test]
fn initial_weights_equal_those_of_pytorch_bit_for_bit() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    for preset in ["tiny", "cnn"] {
        let path = match peer_weights(preset, folder.path()) {
            Ok(path) => path,
            Err(reason) => {
                eprintln!("SKIPPED initial_weights_equal_those_of_pytorch_bit_for_bit: {reason}");
                return Ok(());
            }
        };
        let build = |seed| -> Result<Box<dyn Module>> {
            let builder = Builder::new(seed);
            Ok(match preset {
                "tiny" => Box::new(Decoder::build(&tiny(), 8, &builder)?),
                _ => Box::new(SimpleCnn::build(&builder)?),
            })
        };
        let (theirs, ours) = (build(2)?, build(1)?);
        weights::load(&path, &theirs)?;
        assert!(equal(&theirs, &ours), "{preset}");
        fs::remove_file(path).unwrap();
    }
    Ok(())
}
