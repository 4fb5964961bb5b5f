//! A worker that takes steps of its own: a replica of the model, on one rank or on a mesh.
//!
//! Rank 0 exchanges whole parameters with the servers, so that each crosses the slow network once in either direction. The other
//! ranks follow it: it sends them what comes next and the parameters, of which they take their shards, and collects the
//! parameters again after their steps.

use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};
use trainyard_nn::{Parameter, Shards};
use trainyard_param_server::{JobInfo, Piece};
use trainyard_torch::World;
use trainyard_trace::Purpose;

use super::local_steps::LocalSteps;
use super::piece_samples::PieceSamples;
use super::shards::{WholeParameters, append_bytes, elements_of, take_elements};
use crate::agreement;
use crate::checkpoint::broadcast_from_rank0;
use crate::error::{Result, TrainError};
use crate::train_spec::TrainSpec;
use crate::trainer::Trainer;

/// Tells apart what ranks send to rank 0 from the messages of pipelines.
const TAG: u16 = 0x7073;

/// What all ranks of a replica do next, as rank 0 decides.
#[derive(Serialize, Deserialize)]
enum Next {
    /// They build the model of this job.
    Build(JobInfo),
    /// They wait: there is no work yet.
    Wait,
    /// They take the steps of this piece.
    Compute(Piece),
    /// They exit: there is no work left.
    Stop,
}

/// What the servers have sent for a piece.
pub(super) struct FromServers<'a> {
    pub jobs: &'a [JobInfo],
    /// The bytes of every server.
    pub bytes: &'a [Vec<u8>],
}

/// The result of a piece.
pub(super) struct Moved {
    /// The summed loss of all steps, divided by the nominal number of targets of an outer step.
    pub loss: f64,
    pub num_targets: i64,
    /// How far the parameters have moved, for every server; on rank 0 only.
    pub bytes: Vec<Vec<u8>>,
}

/// This rank of a replica.
pub(super) struct Replica<'a> {
    world: &'a World,
    trainer: Trainer,
    samples: PieceSamples,
    local_steps: LocalSteps,
    /// The parameters in the order of the servers.
    members: Vec<Member>,
}

/// A parameter of the model.
struct Member {
    is_trainable: bool,
    /// The objects on this rank: none if it belongs to another pipeline stage, several if it is tied.
    own: Vec<Parameter>,
    /// The first rank that has it.
    first_holder: usize,
}

impl<'a> Replica<'a> {
    /// Builds the model on rank 0, and lets the other ranks do the same.
    pub(super) fn lead(
        run: &TrainSpec,
        world: &'a World,
        job: &JobInfo,
        local_steps: LocalSteps,
    ) -> Result<Replica<'a>> {
        decide(world, &Next::Build(job.clone()))?;
        Replica::new(run, world, job, local_steps)
    }

    fn new(
        run: &TrainSpec,
        world: &'a World,
        job: &JobInfo,
        local_steps: LocalSteps,
    ) -> Result<Replica<'a>> {
        let spec = &run.with_config(run.for_worker(local_steps.replica_batch(), world.size())?);
        let trainer = Trainer::new(spec, world, world.device().into())?;
        Ok(Replica {
            samples: PieceSamples::open(spec, trainer.batching(), world.device())?,
            members: members(trainer.parameters(), job, world)?,
            trainer,
            world,
            local_steps,
        })
    }

    /// Takes the steps of a piece from these parameters on. Called on rank 0; the others follow.
    pub(super) fn compute(&mut self, piece: Piece, from: &FromServers<'_>) -> Result<Moved> {
        decide(self.world, &Next::Compute(piece))?;
        self.compute_with(piece, Some(from))
    }

    fn compute_with(&mut self, piece: Piece, from: Option<&FromServers<'_>>) -> Result<Moved> {
        self.load(from)?;
        let steps = self.local_steps;
        let (loss, num_targets) = steps.take(&mut self.trainer, &self.samples.stream, piece)?;
        let weight = steps.weight(&self.trainer, num_targets);
        Ok(Moved {
            loss,
            num_targets,
            bytes: self.movement(from, weight)?,
        })
    }

    /// Sends the parameters of the servers to all ranks, each of which takes its shards.
    fn load(&self, from: Option<&FromServers<'_>>) -> Result<()> {
        let mut whole = from.map(WholeParameters::of);
        for member in &self.members {
            let mut bytes = match &mut whole {
                Some(whole) => whole.next()?,
                None => Vec::new(),
            };
            if self.world.size() > 1 {
                bytes = broadcast_from_rank0(&bytes, self.world)?;
            }
            for parameter in &member.own {
                let shape: Vec<i64> = parameter.shape().iter().map(|&n| n as i64).collect();
                let num = parameter.shape().iter().product();
                let full = take_elements(&mut &bytes[..], num, parameter.kind())?;
                let shards = Shards::of(parameter, self.world)?;
                let own = shards.own(&full.f_view(&shape[..])?)?.f_reshape(-1i64)?;
                let mut target = parameter.tensor().f_detach()?.f_view(-1i64)?;
                tch::no_grad(|| target.f_copy_(&own))?;
            }
        }
        Ok(())
    }

    /// How far the parameters have moved, times `weight`, for every server; empty but on rank 0.
    fn movement(&self, from: Option<&FromServers<'_>>, weight: f64) -> Result<Vec<Vec<u8>>> {
        let mut before = from.map(WholeParameters::of);
        let mut moved = vec![Vec::new(); from.map_or(0, |from| from.jobs.len())];
        for (index, member) in self.members.iter().enumerate() {
            let before = before.as_mut().map(WholeParameters::next).transpose()?;
            if !member.is_trainable {
                continue;
            }
            let after = self.collect(member, before.as_ref().map_or(0, Vec::len))?;
            let (Some(from), Some(before), Some(after)) = (from, before, after) else {
                continue;
            };
            let kind = self.kind()?;
            let flat = |bytes: &[u8]| {
                take_elements(&mut &*bytes, bytes.len() / kind.elt_size_in_bytes(), kind)
            };
            let movement = flat(&before)?.f_sub(&flat(&after)?)?.f_mul_scalar(weight)?;
            for (job, moved) in from.jobs.iter().zip(&mut moved) {
                for elements in &job.shards[index].elements {
                    append_bytes(&elements_of(&movement, elements)?, moved)?;
                }
            }
        }
        Ok(moved)
    }

    /// The bytes of a whole parameter, on rank 0.
    fn collect(&self, member: &Member, num_bytes: usize) -> Result<Option<Vec<u8>>> {
        let mut bytes = None;
        if let Some(parameter) = member.own.first() {
            let full = Shards::of(parameter, self.world)?.gather(parameter.tensor())?;
            if [0, member.first_holder].contains(&self.world.rank()) {
                append_bytes(&full, bytes.insert(Vec::new()))?;
            }
        }
        if member.first_holder == 0 {
            return Ok(bytes);
        }
        let group = self.world.world_group()?;
        if self.world.rank() == member.first_holder {
            let bytes = Tensor::f_from_slice(&bytes.take().unwrap_or_default())?;
            group.send(&bytes, 0, TAG, Purpose::State)?.wait()?;
        } else if self.world.rank() == 0 {
            let received = Tensor::f_zeros([num_bytes as i64], (Kind::Uint8, Device::Cpu))?;
            group
                .recv(&received, member.first_holder, TAG, Purpose::State)?
                .wait()?;
            return Ok(Some(Vec::<u8>::try_from(&received)?));
        }
        Ok(None)
    }

    /// The type of all trained parameters.
    fn kind(&self) -> Result<Kind> {
        let mut trained = self.trainer.parameters().iter();
        let first = trained.find(|parameter| parameter.is_trainable());
        Ok(first.ok_or(TrainError::NoParameters)?.kind())
    }
}

/// Lets the other ranks of a replica know that there is no work yet, before their collectives time out.
pub(super) fn keep_waiting(world: &World) -> Result<()> {
    decide(world, &Next::Wait)
}

/// Lets the other ranks of a replica exit. This is a collective call.
pub(super) fn stop(world: &World) -> Result<()> {
    decide(world, &Next::Stop)?;
    leave(world)
}

/// Does what rank 0 decides until it stops.
pub(super) fn follow(run: &TrainSpec, world: &World) -> Result<()> {
    let mut replica = None;
    loop {
        match receive_decision(world)? {
            Next::Wait => {}
            Next::Build(job) => {
                let local_steps = LocalSteps::new(run, &job).ok_or_else(|| {
                    TrainError::ParameterServer(
                        "only workers that take steps of their own have several ranks".to_owned(),
                    )
                })?;
                replica = Some(Replica::new(run, world, &job, local_steps)?);
            }
            Next::Compute(piece) => {
                if let Some(replica) = &mut replica {
                    replica.compute_with(piece, None)?;
                }
            }
            Next::Stop => return leave(world),
        }
    }
}

/// Sends what is next from rank 0 to the other ranks.
fn decide(world: &World, next: &Next) -> Result<()> {
    if world.size() > 1 {
        broadcast_from_rank0(&serde_json::to_vec(next).unwrap_or_default(), world)?;
    }
    Ok(())
}

fn receive_decision(world: &World) -> Result<Next> {
    let next = broadcast_from_rank0(&[], world)?;
    serde_json::from_slice(&next).map_err(|error| TrainError::ParameterServer(error.to_string()))
}

/// Rank 0 may host the TCPStore: no rank exits before all are done.
fn leave(world: &World) -> Result<()> {
    if world.size() > 1 {
        world.world_group()?.barrier()?.wait()?;
    }
    Ok(())
}

/// The parameters of a job in the order of its servers. This is a collective call.
fn members(parameters: &[Parameter], job: &JobInfo, world: &World) -> Result<Vec<Member>> {
    let named = |name: &str| {
        let found = parameters.iter().filter(|p| p.name() == name);
        found.cloned().collect::<Vec<_>>()
    };
    let own: Vec<Vec<Parameter>> = job.shards.iter().map(|shard| named(&shard.name)).collect();
    let is_here: Vec<i64> = own.iter().map(|own| i64::from(!own.is_empty())).collect();
    let by_rank = agreement::gather(&world.world_group()?, &is_here)?;
    let first_holder = |index: usize| {
        let mut of_parameter = by_rank.iter().skip(index).step_by(is_here.len());
        let found = of_parameter.position(|&is_here| is_here > 0);
        found.ok_or_else(|| {
            let name = &job.shards[index].name;
            TrainError::ParameterServer(format!("no rank of this worker has {name}"))
        })
    };
    let members = own.into_iter().enumerate().map(|(index, own)| {
        Ok(Member {
            is_trainable: job.shards[index].is_trainable,
            own,
            first_holder: first_holder(index)?,
        })
    });
    members.collect()
}
