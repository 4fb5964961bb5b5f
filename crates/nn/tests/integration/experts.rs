//! An MoE layer on one rank, compared with its definition token by token.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};
use trainyard_arch::{MoeConfig, ScoringFunc};
use trainyard_nn::{Builder, Context, Device, Init, MixtureOfExperts, Module, NnError, Result};

const WIDTH: usize = 6;
const OPTIONS: (Kind, tch::Device) = (Kind::Double, tch::Device::Cpu);

fn config() -> MoeConfig {
    MoeConfig::plain(5, 2, 4)
}

fn build(config: &MoeConfig) -> Result<MixtureOfExperts> {
    let builder = Builder::new(3).kind(Kind::Double).push("mlp");
    MixtureOfExperts::build(&builder, 0, WIDTH, config, Init::with_std(0.7))
}

fn weights(mixture: &MixtureOfExperts) -> BTreeMap<String, Tensor> {
    let parameters = mixture.parameters().into_iter();
    parameters
        .map(|p| (p.name().to_owned(), p.tensor().shallow_clone()))
        .collect()
}

fn swiglu(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor) -> Tensor {
    let map = |x: &Tensor, weight: &Tensor| x.linear(weight, None::<&Tensor>);
    map(&(map(x, gate).silu() * map(x, up)), down)
}

/// The reference: every expert for every token.
fn reference(config: &MoeConfig, weights: &BTreeMap<String, Tensor>, x: &Tensor) -> Tensor {
    let logits = x.linear(&weights["mlp.gate.weight"], None::<&Tensor>);
    let scores = match config.scoring_func {
        ScoringFunc::Softmax => logits.softmax(-1, Kind::Double),
        ScoringFunc::Sigmoid => logits.sigmoid(),
    };
    let preferred = match weights.get("mlp.gate.e_score_correction_bias") {
        Some(bias) => &scores + bias,
        None => scores.shallow_clone(),
    };
    let (_, chosen) = preferred.topk(config.num_experts_per_tok as i64, -1, true, true);
    let mask = scores.zeros_like().scatter_value(-1, &chosen, 1.0);
    let mut share = scores * mask;
    if config.norm_topk_prob {
        share = &share / share.sum_dim_intlist(-1i64, true, Kind::Double);
    }
    let share = share * config.routed_scaling_factor;
    let mut sum = x.zeros_like();
    for expert in 0..config.num_experts as i64 {
        let both = weights["mlp.experts.gate_up_proj"].select(0, expert);
        let halves = both.chunk(2, 0);
        let down = weights["mlp.experts.down_proj"].select(0, expert);
        let output = swiglu(x, &halves[0], &halves[1], &down);
        sum += output * share.select(-1, expert).unsqueeze(-1);
    }
    if config.n_shared_experts > 0 {
        let of = |name: &str| &weights[&format!("mlp.shared_experts.{name}_proj.weight")];
        sum += swiglu(x, of("gate"), of("up"), of("down"));
    }
    sum
}

fn gradients(mixture: &MixtureOfExperts, x: &Tensor, output: &Tensor) -> Vec<Tensor> {
    output.square().sum(Kind::Double).backward();
    take_gradients(mixture, x)
}

/// Takes and clears the gradients.
fn take_gradients(mixture: &MixtureOfExperts, x: &Tensor) -> Vec<Tensor> {
    let leaves = weights(mixture).into_values().filter(|w| w.requires_grad());
    let leaves: Vec<Tensor> = leaves.chain([x.shallow_clone()]).collect();
    let take = |leaf: &Tensor| {
        let found = leaf.grad().copy();
        trainyard_torch::autograd::clear_grad(leaf).unwrap();
        found
    };
    leaves.iter().map(take).collect()
}

fn assert_close(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let difference = (found - expected).abs().max().double_value(&[]);
        assert!(difference < 1e-11, "{difference:e}");
    }
}

fn tokens(batch: i64, length: i64) -> Tensor {
    tch::manual_seed(5);
    Tensor::randn([batch, length, WIDTH as i64], OPTIONS).set_requires_grad(true)
}

#[test]
fn outputs_and_gradients_equal_the_reference() -> Result<()> {
    let plain = config();
    let variants = [
        plain.clone(),
        MoeConfig {
            norm_topk_prob: false,
            routed_scaling_factor: 2.5,
            ..plain.clone()
        },
        MoeConfig {
            scoring_func: ScoringFunc::Sigmoid,
            n_shared_experts: 2,
            bias_update_rate: Some(0.1),
            ..plain.clone()
        },
        MoeConfig {
            num_experts_per_tok: 5,
            ..plain.clone()
        },
        MoeConfig {
            // More experts than the tokens can use.
            num_experts: 64,
            num_experts_per_tok: 1,
            ..plain
        },
    ];
    for config in variants {
        let mixture = build(&config)?;
        if let Some(bias) = weights(&mixture).get_mut("mlp.gate.e_score_correction_bias") {
            bias.copy_(&Tensor::from_slice(&[0.0, 0.4, -0.4, 0.2, 0.0]));
        }
        let x = tokens(3, 7);
        let found = mixture.forward(&x, &Context::training(0))?;
        let found_gradients = gradients(&mixture, &x, &found);
        let expected = reference(&config, &weights(&mixture), &x);
        let expected_gradients = gradients(&mixture, &x, &expected);
        assert_close(&[found], &[expected]);
        assert_close(&found_gradients, &expected_gradients);
    }
    Ok(())
}

#[test]
fn losses_of_a_batch_are_the_sums_over_micro_batches() -> Result<()> {
    for scoring_func in [ScoringFunc::Softmax, ScoringFunc::Sigmoid] {
        let mixture = build(&MoeConfig {
            router_aux_loss_coef: 0.3,
            router_z_loss_coef: 0.2,
            scoring_func,
            ..config()
        })?;
        let x = tokens(4, 6);
        let cx = Context::training(0).with_loss_weight(0.125);
        let pass = |x: &Tensor| -> Result<()> {
            let output = mixture.forward(x, &cx)?;
            output.square().sum(Kind::Double).backward();
            Ok(())
        };
        pass(&x)?;
        let full = take_gradients(&mixture, &x);
        for part in x.chunk(2, 0) {
            pass(&part)?;
        }
        assert_close(&take_gradients(&mixture, &x), &full);
    }
    Ok(())
}

#[test]
fn losses_equal_the_reference() -> Result<()> {
    let config = MoeConfig {
        router_aux_loss_coef: 0.3,
        router_z_loss_coef: 0.2,
        ..config()
    };
    let mixture = build(&config)?;
    let x = tokens(3, 8);
    let cx = Context::training(0).with_loss_weight(1.0 / 24.0);
    mixture.forward(&x, &cx)?.sum(Kind::Double).backward();
    let found = take_gradients(&mixture, &x);

    let weights = weights(&mixture);
    let plain = reference(&config, &weights, &x).sum(Kind::Double);
    let logits = x.linear(&weights["mlp.gate.weight"], None::<&Tensor>);
    let scores = logits.softmax(-1, Kind::Double);
    let (_, chosen) = scores.topk(2, -1, true, true);
    let chosen_by = scores.zeros_like().scatter_value(-1, &chosen, 1.0);
    // Per sequence: Σ_e (E / (k·S) · n_e) · mean_t p_te, averaged over the three sequences.
    let loads = chosen_by.sum_dim_intlist(1i64, false, Kind::Double) * (5.0 / (2.0 * 8.0));
    let shares = scores.mean_dim(1i64, false, Kind::Double);
    let imbalance = (loads * shares).sum(Kind::Double) / 3.0;
    let sizes = logits.logsumexp(-1i64, false).square().mean(Kind::Double);
    (plain + imbalance * 0.3 + sizes * 0.2).backward();
    assert_close(&found, &take_gradients(&mixture, &x));
    Ok(())
}

#[test]
fn an_auxiliary_loss_without_a_loss_weight_is_rejected() -> Result<()> {
    let mixture = build(&MoeConfig {
        router_aux_loss_coef: 0.3,
        ..config()
    })?;
    let result = mixture.forward(&tokens(1, 4), &Context::training(0));
    assert!(matches!(result, Err(NnError::MissingLossWeight)));
    // Evaluation has no auxiliary loss.
    let _ = mixture.forward(&tokens(1, 4), &Context::evaluation(0))?;
    Ok(())
}

#[test]
fn an_expert_accepts_the_first_rows_up_to_its_capacity() -> Result<()> {
    let limited = MoeConfig {
        num_experts: 4,
        num_experts_per_tok: 1,
        capacity_factor: Some(1.0),
        ..config()
    };
    let mixture = build(&limited)?;
    // All tokens choose the same expert, whose capacity is 2 per sequence of 8.
    let x = Tensor::ones([2, 8, WIDTH as i64], OPTIONS).set_requires_grad(true);
    let output = mixture.forward(&x, &Context::training(0))?;
    let of_token = output.abs().sum_dim_intlist(2i64, false, Kind::Double);
    let is_accepted = Vec::<bool>::try_from(of_token.gt(0.0).view(-1))?;
    for sequence in is_accepted.chunks(8) {
        assert_eq!(
            sequence,
            [true, true, false, false, false, false, false, false]
        );
    }
    output.sum(Kind::Double).backward();
    assert!(x.grad().select(1, 7).abs().max().double_value(&[]) == 0.0);
    // With enough capacity, the result equals that without a limit.
    let ample = build(&MoeConfig {
        capacity_factor: Some(4.0),
        ..limited.clone()
    })?;
    let unlimited = build(&MoeConfig {
        capacity_factor: None,
        ..limited
    })?;
    let cx = Context::training(0);
    assert!(ample.forward(&x, &cx)?.equal(&unlimited.forward(&x, &cx)?));
    Ok(())
}

#[test]
fn the_bias_moves_towards_experts_with_low_load() -> Result<()> {
    let mixture = build(&MoeConfig {
        bias_update_rate: Some(0.01),
        ..config()
    })?;
    let router = mixture.router();
    router.update_bias(&Tensor::from_slice(&[10i64, 2, 6, 6, 6]))?;
    let bias = &weights(&mixture)["mlp.gate.e_score_correction_bias"];
    assert_eq!(Vec::<f64>::try_from(bias)?, [-0.01, 0.01, 0.0, 0.0, 0.0]);
    assert!(!bias.requires_grad());
    Ok(())
}

#[test]
fn load_is_per_step_and_recomputation_counts_once() -> Result<()> {
    let mixture = build(&config())?;
    let x = tokens(2, 5);
    let step =
        |step: u64, sample: u64| mixture.forward(&x, &Context::training(step).at_sample(sample));
    let total = || -> Result<i64> {
        let load = mixture.router().load().step_counts()?;
        Ok(load.map_or(0, |load| load.sum(Kind::Int64).int64_value(&[])))
    };
    assert_eq!(total()?, 0);
    let _ = step(0, 0)?;
    let _ = step(0, 0)?;
    assert_eq!(total()?, 20);
    let _ = step(0, 2)?;
    assert_eq!(total()?, 40);
    let _ = step(1, 0)?;
    assert_eq!(total()?, 20);
    Ok(())
}

#[test]
fn meta_tokens_are_distributed_by_the_synthetic_skew() -> Result<()> {
    let config = MoeConfig {
        num_experts: 256,
        num_experts_per_tok: 8,
        moe_intermediate_size: 2048,
        n_shared_experts: 1,
        router_aux_loss_coef: 1e-4,
        capacity_factor: Some(1.0),
        bias_update_rate: Some(1e-3),
        ..config()
    };
    let builder = Builder::new(1).kind(Kind::BFloat16).device(Device::Meta);
    let mixture = MixtureOfExperts::build(&builder, 0, 7168, &config, Init::with_std(0.02))?;
    let x = Device::Meta.empty(&[2, 4096, 7168], Kind::BFloat16)?;
    let x = x.set_requires_grad(true);
    let cx = Context::training(0).with_loss_weight(1.0);
    let output = mixture.forward(&x, &cx)?;
    assert_eq!(output.size(), x.size());
    output.sum(Kind::Float).backward();
    assert_eq!(x.grad().size(), x.size());
    Ok(())
}
