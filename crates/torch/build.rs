//! Compiles the C++ side of the bridge against the libtorch that `./setup` installed, and the GPU library if the CUDA
//! headers are installed too (`./setup --cuda`).

use std::path::{Path, PathBuf};

const SOURCES: [&str; 11] = [
    "attention.cc",
    "autograd.cc",
    "device.cc",
    "gpu_library.cc",
    "group.cc",
    "kernel.cc",
    "malloc.cc",
    "meta.cc",
    "observe.cc",
    "storage.cc",
    "uncaught.cc",
];

fn main() {
    println!("cargo:rerun-if-changed=cpp");
    println!("cargo:rerun-if-env-changed=LIBTORCH");
    let Some(libtorch) = std::env::var_os("LIBTORCH").map(PathBuf::from) else {
        eprintln!("LIBTORCH is not set: run ./setup first, which writes .cargo/config.toml");
        std::process::exit(1);
    };

    let mut bridge = cxx_build::bridge("src/bridge.rs");
    configure(&mut bridge, &libtorch);
    bridge.files(SOURCES.map(|name| Path::new("cpp").join(name)));
    bridge.compile("trainyard_torch");
    build_gpu_library(&libtorch);

    let lib = libtorch.join("lib");
    println!("cargo:rustc-link-search=native={}", lib.display());
    // Not `torch`: it only pulls in the CUDA libraries, which take a third of a program's startup time.
    for name in ["torch_cpu", "c10"] {
        println!("cargo:rustc-link-lib={name}");
    }
}

fn configure(build: &mut cc::Build, libtorch: &Path) {
    build
        .cpp(true)
        .std("c++20")
        .include("cpp")
        .include(libtorch.join("include"))
        .include(libtorch.join("include/torch/csrc/api/include"))
        .define("USE_C10D_GLOO", None)
        .define("USE_DISTRIBUTED", None)
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // As libtorch itself was built: without it, its headers check state that a release build does not set.
        .define("NDEBUG", None)
        // libtorch's headers cause many warnings.
        .flag("-Wno-unused-parameter")
        .flag("-Wno-sign-compare")
        .flag("-Wno-extra")
        // Debug information of libtorch's headers would be larger than the code.
        .debug(false)
        .opt_level(2);
}

/// Builds the GPU library and puts it beside the programs. The headers are those of the packages next to torch.
fn build_gpu_library(libtorch: &Path) {
    let site = libtorch.parent().unwrap_or(libtorch);
    let includes = ["cu13/include", "nccl/include", "cu13/include/cccl"];
    let includes = includes.map(|path| site.join("nvidia").join(path));
    // The last package that `./setup --cuda` installs brings this one.
    let header = includes[0].join("crt/host_defines.h");
    println!("cargo:rerun-if-changed={}", header.display());
    if !header.exists() {
        return;
    }
    let mut build = cc::Build::new();
    configure(&mut build, libtorch);
    build
        .includes(&includes)
        .define("USE_C10D_NCCL", None)
        .flag("-Wno-interference-size")
        .file("cpp/nccl/nccl.cc");
    let lib = libtorch.join("lib");
    let mut link = build.get_compiler().to_command();
    link.args(["-shared", "-o"])
        .arg(beside_programs("libtrainyard_nccl.so"))
        .args(build.compile_intermediates())
        .arg(format!("-L{}", lib.display()))
        .arg(format!("-Wl,-rpath,{}", lib.display()))
        .args(["torch_cuda", "c10_cuda", "torch_cpu", "c10"].map(|name| format!("-l{name}")));
    match link.status() {
        Ok(status) if status.success() => {}
        failed => panic!("cannot link the GPU library: {failed:?}"),
    }
}

/// The path of a file in the directory of the programs. Cargo names only a directory three levels below it.
fn beside_programs(name: &str) -> PathBuf {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let directory = out.ancestors().nth(3).unwrap_or(&out);
    directory.join(name)
}
