//! The fastest candidate of a layout that fits in memory.

use trainyard_schedule::ScheduleError;
use trainyard_trace::{CollectiveKind, Purpose};

use super::price::price;
use super::{Candidate, Layout, RankRun};
use crate::cost_model::CollectiveCalls;
use crate::{Calibration, Cluster, Degrees, Overheads, Recompute, Time};

/// The error that is assumed for models of which no run has been compared with its prediction. Llama 3 8B, which has a
/// calibrated formula to compare with, takes 1.46 times as long by dry run: all scores of causal attention count, and
/// no element-wise kernels are fused.
const MEAN_ERROR: f64 = 0.5;

/// What to plan for a model of any kind.
#[derive(Clone, Debug)]
pub struct AnyModelRequest {
    /// The nodes and their accelerators.
    pub cluster: Cluster,
    /// How far programs fall short of data sheets.
    pub calibration: Calibration,
    /// Memory that no tensor accounts for.
    pub overheads: Overheads,
    /// Samples in a step, over all ranks.
    pub global_batch: usize,
}

/// A candidate with its estimated step time and its counted memory.
#[derive(Clone, Debug, PartialEq)]
pub struct AnyModelPlan {
    /// The strategy.
    pub candidate: Candidate,
    /// The estimated step time, term by term. Recomputation is part of `compute`.
    pub time: Time,
    /// Peak memory of the rank that needs the most, with overheads.
    pub peak_bytes: f64,
    /// The dry run of every pipeline stage.
    pub ranks: Vec<RankRun>,
}

/// What became of a layout.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The fastest candidate that fits.
    Fits(AnyModelPlan),
    /// No candidate fits; this one needs the least memory.
    TooLarge(AnyModelPlan),
    /// The layout cannot train this model or divide this batch, for this reason.
    Impossible(String),
}

impl AnyModelRequest {
    /// The mean error of estimates.
    pub fn mean_error(&self) -> f64 {
        self.calibration.mean_error.max(MEAN_ERROR)
    }

    /// The memory of an accelerator.
    pub const fn capacity(&self) -> f64 {
        self.cluster.accelerator.memory.value
    }

    /// The peak memory of the rank that needs the most, with overheads.
    fn peak_bytes(&self, degrees: &Degrees, ranks: &[RankRun]) -> f64 {
        let tensors = ranks.iter().map(|run| run.peak_bytes).max().unwrap_or(0) as f64;
        tensors + self.overheads.of(degrees, tensors).total()
    }

    fn plan(
        &self,
        candidate: Candidate,
        ranks: Vec<RankRun>,
    ) -> Result<AnyModelPlan, ScheduleError> {
        Ok(AnyModelPlan {
            time: price(self, &candidate, &ranks)?,
            peak_bytes: self.peak_bytes(&candidate.layout.degrees, &ranks),
            candidate,
            ranks,
        })
    }
}

/// Searches the candidates of one layout.
///
/// `dry_run` runs one rank of a candidate. Its inner error says why the model cannot be trained that way; the outer
/// one ends the search.
///
/// # Errors
/// Those of `dry_run`.
pub fn best_of_layout<E>(
    request: &AnyModelRequest,
    layout: Layout,
    dry_run: impl Fn(&Candidate, usize) -> Result<Result<RankRun, String>, E>,
) -> Result<Outcome, E> {
    let sizes = layout.micro_batches(request.global_batch);
    if sizes.is_empty() {
        return Ok(Outcome::Impossible(undivided(request, &layout)));
    }
    let local_batch = request.global_batch / layout.degrees.data_parallel();
    let mut plans: Vec<AnyModelPlan> = Vec::new();
    for recompute in [Recompute::None, Recompute::Full] {
        for &micro_batch in &sizes {
            let candidate = Candidate {
                layout,
                micro_batch,
                num_microbatches: local_batch / micro_batch,
                recompute,
            };
            let ranks = layout.representatives().into_iter();
            let ranks: Result<Vec<_>, E> = ranks.map(|rank| dry_run(&candidate, rank)).collect();
            let ranks: Result<Vec<RankRun>, String> = ranks?.into_iter().collect();
            let plan = ranks.and_then(|ranks| {
                let plan = request.plan(candidate, ranks);
                plan.map_err(|error| error.to_string())
            });
            match plan {
                Ok(plan) if !is_tensor_parallel(&plan) => {
                    let why = "none of the model's layers is divided over tensor-parallel ranks";
                    return Ok(Outcome::Impossible(why.to_owned()));
                }
                Ok(plan) => plans.push(plan),
                Err(why) if plans.is_empty() => return Ok(Outcome::Impossible(why)),
                // Without recomputation it could be trained.
                Err(_) => return Ok(choose(request, plans)),
            }
            if layout.degrees.pp == 1 && fits(request, plans.last()) {
                break;
            }
        }
        // Recomputation costs time; only memory can make it necessary.
        if plans
            .first()
            .is_some_and(|largest| fits(request, Some(largest)))
        {
            break;
        }
    }
    Ok(choose(request, plans))
}

/// Whether ranks with a tensor-parallel axis communicate along it. If they do not, all compute the same.
fn is_tensor_parallel(plan: &AnyModelPlan) -> bool {
    let mut collectives = plan.ranks.iter().flat_map(|run| &run.work.collectives);
    let is_along_axis = |calls: &CollectiveCalls| {
        calls.purpose == Purpose::Activation
            && !matches!(calls.kind, CollectiveKind::Send | CollectiveKind::Recv)
    };
    plan.candidate.layout.degrees.tp == 1 || collectives.any(is_along_axis)
}

fn fits(request: &AnyModelRequest, plan: Option<&AnyModelPlan>) -> bool {
    plan.is_some_and(|plan| plan.peak_bytes <= request.capacity())
}

/// The fastest plan that fits, or else the smallest.
fn choose(request: &AnyModelRequest, plans: Vec<AnyModelPlan>) -> Outcome {
    let (fitting, others): (Vec<_>, Vec<_>) = plans
        .into_iter()
        .partition(|plan| fits(request, Some(plan)));
    let by_time = |a: &AnyModelPlan, b: &AnyModelPlan| a.time.likely.total_cmp(&b.time.likely);
    let by_memory = |a: &AnyModelPlan, b: &AnyModelPlan| a.peak_bytes.total_cmp(&b.peak_bytes);
    match fitting.into_iter().min_by(by_time) {
        Some(fastest) => Outcome::Fits(fastest),
        None => match others.into_iter().min_by(by_memory) {
            Some(smallest) => Outcome::TooLarge(smallest),
            None => Outcome::Impossible("no candidate was tried".to_owned()),
        },
    }
}

fn undivided(request: &AnyModelRequest, layout: &Layout) -> String {
    let (samples, ranks) = (request.global_batch, layout.degrees.data_parallel());
    match layout.degrees.pp {
        1 => format!(
            "a global batch of {samples} cannot be divided over {ranks} data-parallel ranks"
        ),
        pp => format!(
            "a global batch of {samples} cannot be divided over {ranks} data-parallel ranks into {} to {} micro-batches",
            2 * pp,
            8 * pp
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use trainyard_trace::{Calls, KernelBytes};

    use super::super::layouts;
    use super::*;
    use crate::cost_model::DryRun;
    use crate::{Degrees, Software};

    const GIB: u64 = 1 << 30;

    fn request(cluster: &str) -> AnyModelRequest {
        let cluster: Cluster = cluster.parse().unwrap();
        AnyModelRequest {
            calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
            cluster,
            overheads: Overheads::none(),
            global_batch: 64,
        }
    }

    fn data_parallel(zero_stage: usize) -> Layout {
        Layout {
            degrees: Degrees {
                dp_replicate: 8,
                ..Degrees::ONE
            },
            zero_stage,
        }
    }

    /// A rank whose memory and time are proportional to its samples, and that sends `sent_bytes`.
    fn rank(candidate: &Candidate, gib_per_sample: u64, sent_bytes: u64) -> RankRun {
        let samples = (candidate.micro_batch * candidate.num_microbatches) as u64;
        let saved = match candidate.recompute {
            Recompute::None => 1,
            _ => 4,
        };
        let sum = Calls {
            name: "aten::sum".to_owned(),
            kernel: Some(KernelBytes {
                read: samples * GIB,
                written: 4,
            }),
            count: 1,
            ..Calls::default()
        };
        let reduction = CollectiveCalls {
            kind: CollectiveKind::AllReduce,
            purpose: Purpose::Gradient,
            count: 1,
            sent_bytes,
        };
        RankRun {
            num_parameters: 1,
            peak_bytes: candidate.micro_batch as u64 * gib_per_sample * GIB / saved,
            bytes_by_kind: BTreeMap::new(),
            flops: 0,
            work: DryRun {
                operators: vec![sum],
                collectives: vec![reduction],
            },
        }
    }

    fn plan(outcome: Outcome) -> AnyModelPlan {
        match outcome {
            Outcome::Fits(plan) => plan,
            other => panic!("{other:?}"),
        }
    }

    fn best(layout: Layout, gib_per_sample: u64) -> Outcome {
        let run = |candidate: &Candidate, _| Ok::<_, ()>(Ok(rank(candidate, gib_per_sample, 1000)));
        best_of_layout(&request("8xH100"), layout, run).unwrap()
    }

    #[test]
    fn the_largest_micro_batch_that_fits_is_chosen() {
        let chosen = |gib| plan(best(data_parallel(0), gib)).candidate;
        assert_eq!(
            (chosen(1).micro_batch, chosen(1).recompute),
            (8, Recompute::None)
        );
        // 80 GB hold 4 samples of 16 GiB, or 8 if three quarters are recomputed, which launches fewer kernels.
        let tight = chosen(16);
        assert_eq!((tight.micro_batch, tight.recompute), (8, Recompute::Full));
        assert!(matches!(best(data_parallel(0), 1000), Outcome::TooLarge(_)));
    }

    #[test]
    fn nothing_is_recomputed_if_everything_fits() {
        let tried = RefCell::new(Vec::new());
        let run = |candidate: &Candidate, _| {
            tried.borrow_mut().push(candidate.recompute);
            Ok::<_, ()>(Ok(rank(candidate, 1, 1000)))
        };
        let _ = best_of_layout(&request("8xH100"), data_parallel(0), run).unwrap();
        assert_eq!(tried.into_inner(), [Recompute::None]);
    }

    #[test]
    fn communication_that_compute_cannot_hide_costs_time() {
        let request = request("8xH100");
        let seconds = |sent_bytes| {
            let run = |candidate: &Candidate, _| Ok::<_, ()>(Ok(rank(candidate, 1, sent_bytes)));
            plan(best_of_layout(&request, data_parallel(0), run).unwrap()).time
        };
        let (little, much) = (seconds(1000), seconds(100 * GIB));
        assert_eq!(little.compute, much.compute);
        let network = 100.0 * GIB as f64 / request.cluster.accelerator.link.value;
        assert!(much.data - little.data > 0.9 * network - much.compute);
    }

    #[test]
    fn what_cannot_run_is_a_reason_and_what_cannot_be_asked_an_error() {
        let request = request("8xH100");
        let refuse = |_: &Candidate, _| Ok::<_, ()>(Err("no units".to_owned()));
        let outcome = best_of_layout(&request, data_parallel(0), refuse).unwrap();
        assert_eq!(outcome, Outcome::Impossible("no units".to_owned()));
        let cannot_recompute = |candidate: &Candidate, _| match candidate.recompute {
            Recompute::None => Ok::<_, ()>(Ok(rank(candidate, 16, 1000))),
            _ => Ok(Err("nothing to recompute".to_owned())),
        };
        let outcome = best_of_layout(&request, data_parallel(0), cannot_recompute).unwrap();
        assert_eq!(plan(outcome).candidate.micro_batch, 4);
        let fail = |_: &Candidate, _| Err(());
        assert!(best_of_layout(&request, data_parallel(0), fail).is_err());
        let odd = AnyModelRequest {
            global_batch: 9,
            ..request
        };
        let outcome = best_of_layout(&odd, data_parallel(0), refuse).unwrap();
        assert!(matches!(outcome, Outcome::Impossible(why) if why.contains("a global batch of 9")));
    }

    #[test]
    fn tensor_parallel_ranks_that_do_not_communicate_are_rejected() {
        let request = request("8xH100");
        for layout in layouts(&request.cluster) {
            let run = |candidate: &Candidate, _| Ok::<_, ()>(Ok(rank(candidate, 1, 1000)));
            let outcome = best_of_layout(&request, layout, run).unwrap();
            let is_rejected = matches!(outcome, Outcome::Impossible(_));
            let can_divide = !layout.micro_batches(request.global_batch).is_empty();
            assert_eq!(
                is_rejected,
                layout.degrees.tp > 1 || !can_divide,
                "{layout:?}"
            );
        }
    }
}
