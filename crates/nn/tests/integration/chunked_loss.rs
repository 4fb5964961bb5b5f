//! The loss in chunks of the tokens, compared with the loss from whole logits.

use tch::{Kind, Tensor};
use trainyard_arch::DecoderConfig;
use trainyard_nn::{Builder, Context, Decoder, Device, Model, Module, NnError, Result, run};
use trainyard_torch::{IGNORE_INDEX, memory};

use crate::presets::token_batch;

const NUM_TOKENS: i64 = 2 * 15;

/// Fifteen positions, so that no number of chunks but 15 divides them evenly.
fn batch() -> Result<(Tensor, Tensor)> {
    let (inputs, targets) = token_batch(2, 15, 256, 5);
    let _ = targets.f_narrow(1, 4, 3)?.f_fill_(IGNORE_INDEX)?;
    Ok((inputs, targets))
}

/// The loss and the gradient of every parameter.
fn step(config: &DecoderConfig, num_chunks: usize, frozen: &str) -> Result<Vec<Tensor>> {
    let builder = Builder::new(1).kind(Kind::Double);
    let model = Decoder::build(config, 15, &builder.with_num_loss_chunks(num_chunks))?;
    for parameter in model.parameters() {
        let is_frozen = !frozen.is_empty() && parameter.name().starts_with(frozen);
        let _ = parameter.tensor().f_set_requires_grad(!is_frozen)?;
    }
    let (inputs, targets) = batch()?;
    let cx = Context::training(0).with_targets(&targets);
    let pass = run(&model, &inputs, &cx, &[])?;
    assert_eq!(pass.output().dim() == 0, num_chunks > 1);
    let loss = (model.loss(pass.output(), &targets)? * 3.0).f_div_scalar(NUM_TOKENS)?;
    let mut values = vec![loss.detach()];
    pass.backward(&loss)?;
    let parameters = model.parameters().into_iter();
    values.extend(parameters.map(|parameter| parameter.tensor().grad()));
    Ok(values)
}

fn assert_equal(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.defined(), expected.defined());
        assert!(!found.defined() || found.allclose(expected, 1e-9, 1e-12, false));
    }
}

#[test]
fn chunks_change_neither_the_loss_nor_a_gradient() -> Result<()> {
    for tie_word_embeddings in [false, true] {
        let config = DecoderConfig {
            tie_word_embeddings,
            ..DecoderConfig::debug()
        };
        let expected = step(&config, 1, "")?;
        for num_chunks in [2, 4, 15, 30, 99] {
            assert_equal(&step(&config, num_chunks, "")?, &expected);
        }
    }
    Ok(())
}

#[test]
fn frozen_parameters_get_no_gradient() -> Result<()> {
    for frozen in ["lm_head", "model"] {
        let config = DecoderConfig::debug();
        assert_equal(&step(&config, 4, frozen)?, &step(&config, 1, frozen)?);
    }
    Ok(())
}

#[test]
fn evaluation_computes_the_same_loss_and_generation_gets_logits() -> Result<()> {
    let model = Decoder::build(
        &DecoderConfig::debug(),
        15,
        &Builder::new(1).kind(Kind::Double).with_num_loss_chunks(4),
    )?;
    let (inputs, targets) = batch()?;
    let output = |cx: &Context| -> Result<Tensor> {
        tch::no_grad(|| Ok(run(&model, &inputs, cx, &[])?.into_output()))
    };
    let logits = output(&Context::evaluation(0))?;
    assert_eq!(logits.dim(), 3);
    let loss = output(&Context::evaluation(0).with_targets(&targets))?;
    assert!(loss.allclose(&model.loss(&logits, &targets)?, 1e-9, 1e-12, false));
    Ok(())
}

#[test]
fn backward_runs_once() -> Result<()> {
    let builder = Builder::new(1).with_num_loss_chunks(2);
    let model = Decoder::build(&DecoderConfig::debug(), 15, &builder)?;
    let (inputs, targets) = batch()?;
    let cx = Context::training(0).with_targets(&targets);
    let loss = run(&model, &inputs, &cx, &[])?.into_output();
    let parameters = model.parameters();
    let leaves: Vec<&Tensor> = parameters.iter().map(|p| p.tensor()).collect();
    Tensor::f_run_backward(&[&loss], &leaves, true, false)?;
    let error = Tensor::f_run_backward(&[&loss], &leaves, true, false).unwrap_err();
    assert!(error.to_string().contains("only once"), "{error}");
    Ok(())
}

/// Peak bytes of a step beyond the parameters, for a head that is much larger than the rest of the model.
fn peak(num_chunks: usize) -> Result<u64> {
    let config = DecoderConfig {
        vocab_size: 32_768,
        ..DecoderConfig::debug()
    };
    let builder = Builder::new(1).device(Device::Meta);
    let model = Decoder::build(&config, 512, &builder.with_num_loss_chunks(num_chunks))?;
    let tokens = Device::Meta.empty(&[1, 512], Kind::Int64)?;
    memory::reset_peak();
    let before = memory::report().map_err(NnError::from)?.total;
    let pass = run(
        &model,
        &tokens,
        &Context::training(0).with_targets(&tokens),
        &[],
    )?;
    let loss = model.loss(pass.output(), &tokens)?;
    pass.backward(&loss)?;
    Ok(memory::report()?.peak - before)
}

#[test]
fn the_peak_of_logits_is_divided_by_the_number_of_chunks() -> Result<()> {
    memory::observe();
    let chunks = [4, 16];
    let logits = 512 * 32_768 * 4;
    // Weights of the embedding and the head have gradients, and the head's exists before backward begins.
    let width = DecoderConfig::debug().hidden_size as u64;
    let gradients = 2 * 32_768 * width * 4;
    let whole = peak(1)?;
    assert!(whole > 3 * logits, "{whole}");
    for num_chunks in chunks {
        let found = peak(num_chunks)?;
        let most = whole / num_chunks as u64 + gradients;
        assert!(
            found < most,
            "{num_chunks} chunks: {found} of {whole} bytes, not {most}"
        );
    }
    Ok(())
}
