//! Numbers on the device that the host reads later, when they have arrived.

use tch::{Kind, Tensor};
use trainyard_torch::device::{self, Event, Stream};
use trainyard_torch::memory;
use trainyard_trace::MemoryKind;

use crate::Result;

/// Scalars on their way to the host.
pub(crate) struct LateValues {
    host: Tensor,
    arrived: Event,
}

impl LateValues {
    /// Starts to copy scalars to the host, which does not wait.
    pub(crate) fn copy(scalars: &[&Tensor]) -> Result<LateValues> {
        let widened = scalars.iter().map(|scalar| scalar.f_to_kind(Kind::Double));
        let widened = widened.collect::<Result<Vec<_>, _>>()?;
        let values = tch::no_grad(|| Tensor::f_stack(&widened, 0))?;
        let device = values.device();
        let host = memory::scope(MemoryKind::Other, || {
            device::staging(&values.size(), Kind::Double, device)
        })?;
        device::copy_non_blocking(&host, &values)?;
        Ok(LateValues {
            host,
            arrived: Stream::current(device)?.record()?,
        })
    }

    /// The numbers. Blocks the host until they have arrived.
    pub(crate) fn read(&self) -> Result<Vec<f64>> {
        self.arrived.wait_host()?;
        Ok(Vec::<f64>::try_from(&self.host)?)
    }
}
