//! The operations per second that the device of a rank can do at most, for model FLOPs utilization (MFU).

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use tch::{Device, Kind, Tensor};
use trainyard_config::MetricsSection;
use trainyard_plan::Accelerator;

/// Where NVIDIA's driver describes its GPUs, in a folder each.
const DRIVER: &str = "/proc/driver/nvidia/gpus";

/// The peak that the config names; else that of the GPU, if it is a known one; on a CPU, what a matrix product reaches
/// with the threads of this process.
pub(crate) fn peak_flops(section: &MetricsSection, device: Device) -> Option<f64> {
    match (section.peak_tflops, device) {
        (Some(teraflops), _) => Some(teraflops * 1e12),
        (None, Device::Cpu) => Some(matrix_product_rate()),
        (None, _) => known_peak(Path::new(DRIVER)),
    }
}

/// The specified dense 16-bit rate of the node's first GPU. All GPUs of a job are usually of one kind.
fn known_peak(driver: &Path) -> Option<f64> {
    let mut folders: Vec<_> = driver.read_dir().ok()?.flatten().collect();
    folders.sort_by_key(|folder| folder.file_name());
    let text = fs::read_to_string(folders.first()?.path().join("information")).ok()?;
    let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(Accelerator::of_product(model.trim())?.peak.value)
}

/// The best of a few float32 products of square matrices, which take some milliseconds.
fn matrix_product_rate() -> f64 {
    const WIDTH: i64 = 512;
    const NUM_PRODUCTS: usize = 6;
    let factor = Tensor::full([WIDTH, WIDTH], 1e-3, (Kind::Float, Device::Cpu));
    let product = |_| {
        let began = Instant::now();
        drop(black_box(factor.matmul(&factor)));
        2.0 * (WIDTH as f64).powi(3) / began.elapsed().as_secs_f64()
    };
    let _no_grad = tch::no_grad_guard();
    (0..NUM_PRODUCTS).map(product).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_config_goes_before_the_device() {
        let section = MetricsSection {
            peak_tflops: Some(2.0),
            ..MetricsSection::default()
        };
        assert_eq!(peak_flops(&section, Device::Cpu), Some(2e12));
        assert_eq!(peak_flops(&section, Device::Cuda(0)), Some(2e12));
        // A core does at least one operation per nanosecond, and no CPU does a petaflop.
        let measured = peak_flops(&MetricsSection::default(), Device::Cpu).unwrap();
        assert!((1e9..1e15).contains(&measured), "{measured}");
    }

    #[test]
    fn the_driver_names_the_gpu() {
        let driver = tempfile::tempdir().unwrap();
        assert_eq!(known_peak(driver.path()), None);
        let gpu = driver.path().join("0000:1b:00.0");
        fs::create_dir(&gpu).unwrap();
        let describe = |model: &str| {
            let text = format!("Model: \t\t {model}\nIRQ:   \t\t 18\n");
            fs::write(gpu.join("information"), text).unwrap();
            known_peak(driver.path())
        };
        assert_eq!(describe("NVIDIA H100 80GB HBM3"), Some(989e12));
        assert_eq!(describe("NVIDIA Abacus"), None);
    }
}
