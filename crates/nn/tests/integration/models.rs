//! The models compared with PyTorch: parameter names, sizes, and one step.

use crate::presets::{gradient_norm, image_batch, llama3_70b, names, small, tiny, token_batch};
use tch::{Kind, Tensor};
use trainyard_arch::{BlockKind, DecoderConfig, LatentAttention, MoeConfig, NormPlacement, QkNorm};
use trainyard_nn::{
    Builder, Context, Decoder, Device, Model, Module, NnError, Result, SimpleCnn, run,
};

/// The mean loss and the gradient norm, as the PyTorch baselines report them.
fn step(model: &dyn Model, inputs: &Tensor, targets: &Tensor) -> Result<(f64, f64)> {
    let pass = run(model, inputs, &Context::training(0), &[])?;
    let loss = model.loss(pass.output(), targets)? / targets.numel() as f64;
    pass.backward(&loss)?;
    Ok((loss.double_value(&[]), gradient_norm(model)))
}

fn assert_near(found: (f64, f64), expected: (f64, f64), tolerance: f64) {
    let differ = |a: f64, b: f64| ((a - b) / b).abs() > tolerance;
    assert!(
        !differ(found.0, expected.0) && !differ(found.1, expected.1),
        "loss and gradient norm {found:?}, expected {expected:?}"
    );
}

#[test]
fn parameter_counts_are_the_published_ones() -> Result<()> {
    let meta = Builder::new(1).device(Device::Meta);
    let count = |config: &DecoderConfig| -> Result<u64> {
        Ok(Decoder::build(config, 128, &meta)?.num_parameters())
    };
    assert_eq!(count(&tiny())?, 1_049_728);
    assert_eq!(count(&small())?, 27_795_968);
    assert_eq!(count(&llama3_70b())?, 70_553_706_496);
    assert_eq!(SimpleCnn::build(&meta)?.num_parameters(), 6_442_762);
    Ok(())
}

/// Decoders whose parameters differ.
fn families() -> Vec<DecoderConfig> {
    let debug = DecoderConfig::debug;
    let experts = MoeConfig {
        n_shared_experts: 1,
        first_k_dense_replace: 1,
        ..MoeConfig::plain(4, 2, 24)
    };
    let latent = LatentAttention {
        q_lora_rank: Some(24),
        kv_lora_rank: 16,
        qk_nope_head_dim: 16,
        qk_rope_head_dim: 8,
        v_head_dim: 12,
    };
    vec![
        debug(),
        DecoderConfig {
            attention_bias: true,
            qk_norm: Some(QkNorm::Head),
            ..debug()
        },
        DecoderConfig {
            norm_placement: NormPlacement::After,
            qk_norm: Some(QkNorm::AllHeads),
            ..debug()
        },
        DecoderConfig {
            norm_placement: NormPlacement::BeforeAndAfter,
            moe: Some(experts),
            ..debug()
        },
        DecoderConfig {
            latent: Some(latent),
            ..debug()
        },
    ]
}

/// The parameters that the planner counts are those of the model: the same names and shapes.
#[test]
fn blocks_have_the_described_parameters() -> Result<()> {
    let builder = Builder::new(1).device(Device::Meta);
    let check = |model: &dyn Model, config: &DecoderConfig, block: &dyn Fn(usize) -> String| {
        for index in 0..config.num_hidden_layers {
            let kind = match config.experts_of(index) {
                Some(_) => BlockKind::Experts,
                None => BlockKind::Dense,
            };
            let described = config.block_parameters(kind).into_iter();
            let mut described: Vec<_> = described.map(|p| (p.name.to_owned(), p.shape)).collect();
            let own = model.parameters().into_iter().filter_map(|parameter| {
                let name = parameter.name().strip_prefix(&block(index))?.to_owned();
                let is_counted = parameter.is_trainable();
                is_counted.then(|| (name, parameter.shape().to_vec()))
            });
            let mut own: Vec<_> = own.collect();
            own.sort();
            described.sort();
            assert_eq!(own, described, "block {index}");
        }
        assert_eq!(model.num_parameters(), config.num_parameters());
    };
    for config in families() {
        let model = Decoder::build(&config, 8, &builder)?;
        check(&model, &config, &|index| format!("model.layers.{index}."));
    }
    let config = DecoderConfig::gpt(2, 64, 4, 128, 32);
    let model = Decoder::build(&config, 8, &builder)?;
    check(&model, &config, &|index| format!("transformer.h.{index}."));
    Ok(())
}

#[test]
fn names_equal_those_of_hugging_face() -> Result<()> {
    let model = Decoder::build(&tiny(), 128, &Builder::new(1).device(Device::Meta))?;
    let mut expected = vec!["model.embed_tokens.weight".to_owned()];
    for layer in 0..4 {
        for part in [
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ] {
            expected.push(format!("model.layers.{layer}.{part}.weight"));
        }
    }
    expected.extend(["model.norm.weight".to_owned(), "lm_head.weight".to_owned()]);
    assert_eq!(names(&model), expected);

    let units: Vec<_> = model
        .units()
        .iter()
        .map(|unit| unit.name().to_owned())
        .collect();
    assert_eq!(
        units,
        [
            "model.embed_tokens",
            "model.layers.0",
            "model.layers.1",
            "model.layers.2",
            "model.layers.3",
            "lm_head"
        ]
    );
    let by_unit: Vec<_> = model
        .units()
        .into_iter()
        .flat_map(|unit| names(unit))
        .collect();
    assert_eq!(by_unit, expected, "every parameter belongs to one unit");
    Ok(())
}

#[test]
fn one_step_of_tiny_equals_pytorch() -> Result<()> {
    let model = Decoder::build(&tiny(), 128, &Builder::new(1))?;
    let (inputs, targets) = token_batch(8, 128, 1024, 1);
    let found = step(&model, &inputs, &targets)?;
    assert_near(found, (6.962626, 1.056391), 1e-6);
    Ok(())
}

#[test]
fn one_step_of_the_cnn_equals_pytorch() -> Result<()> {
    let model = SimpleCnn::build(&Builder::new(1))?;
    assert_eq!(names(&model)[..2], ["conv1.weight", "conv1.bias"]);
    let (images, labels) = image_batch(64, 1);
    let found = step(&model, &images, &labels)?;
    assert_near(found, (2.297230, 0.962589), 1e-6);
    Ok(())
}

#[test]
fn other_dtypes_compute_the_same_model() -> Result<()> {
    let (inputs, targets) = token_batch(8, 128, 1024, 1);
    let double = Decoder::build(&tiny(), 128, &Builder::new(1).kind(Kind::Double))?;
    assert_near(
        step(&double, &inputs, &targets)?,
        (6.962626, 1.056391),
        1e-6,
    );
    let mixed = Decoder::build(&tiny(), 128, &Builder::new(1).compute_kind(Kind::BFloat16))?;
    assert_near(step(&mixed, &inputs, &targets)?, (6.962626, 1.056391), 1e-2);
    let gradients = mixed.parameters();
    assert!(
        gradients
            .iter()
            .all(|p| p.tensor().grad().kind() == Kind::Float)
    );
    Ok(())
}

#[test]
fn a_prefix_of_a_sequence_has_the_same_output() -> Result<()> {
    let model = Decoder::build(&tiny(), 16, &Builder::new(1).kind(Kind::Double))?;
    let (inputs, _) = token_batch(2, 16, 1024, 1);
    let logits =
        |x: &Tensor| Ok::<_, NnError>(run(&model, x, &Context::evaluation(0), &[])?.into_output());
    let (full, part) = (logits(&inputs)?, logits(&inputs.narrow(1, 0, 5))?);
    assert!(full.narrow(1, 0, 5).allclose(&part, 1e-12, 1e-12, false));
    let longer = Tensor::zeros([1, 17], (Kind::Int64, tch::Device::Cpu));
    assert!(matches!(
        logits(&longer),
        Err(NnError::SequenceTooLong {
            length: 17,
            limit: 16
        })
    ));
    Ok(())
}

#[test]
fn a_tied_head_shares_the_embedding_and_counts_once() -> Result<()> {
    let config = DecoderConfig {
        tie_word_embeddings: true,
        ..tiny()
    };
    let model = Decoder::build(&config, 128, &Builder::new(1).kind(Kind::Double))?;
    assert_eq!(model.num_parameters(), 1_049_728 - 131_072);
    assert!(!names(&model).contains(&"lm_head.weight".to_owned()));

    // Rows of tokens that are not in the input get a gradient only from the head.
    let (inputs, targets) = token_batch(1, 4, 1024, 1);
    step(&model, &inputs, &targets)?;
    let gradient = model.parameters()[0].tensor().grad();
    let touched = gradient
        .abs()
        .sum_dim_intlist(1i64, false, Kind::Double)
        .gt(0.0);
    assert_eq!(touched.sum(Kind::Int64).int64_value(&[]), 1024);
    Ok(())
}

#[test]
fn inconsistent_sizes_are_rejected() {
    let refused = |config: DecoderConfig| {
        Decoder::build(&config, 8, &Builder::new(1))
            .unwrap_err()
            .to_string()
    };
    let heads = refused(DecoderConfig {
        num_key_value_heads: 3,
        ..tiny()
    });
    assert!(heads.contains("num_key_value_heads = 3"), "{heads}");
    let odd = refused(DecoderConfig {
        head_dim: 31,
        ..tiny()
    });
    assert!(odd.contains("head_dim = 31"), "{odd}");
}

#[test]
fn a_step_on_meta_gives_every_parameter_a_gradient() -> Result<()> {
    let model = Decoder::build(&tiny(), 128, &Builder::new(1).device(Device::Meta))?;
    let tokens = || Device::Meta.empty(&[8, 128], Kind::Int64);
    let pass = run(&model, &tokens()?, &Context::training(0), &[])?;
    let loss = model.loss(pass.output(), &tokens()?)? / 1024.0;
    pass.backward(&loss)?;
    for parameter in model.parameters() {
        let gradient = parameter.tensor().grad();
        assert!(gradient.defined(), "{parameter:?}");
        assert_eq!(gradient.size(), parameter.tensor().size());
    }
    Ok(())
}
