"""diffusers: training of UNets and diffusion transformers, and pipelines, from configurations."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.recorded.cases.libraries.registry import program

_TOKENS = 77
_VOCABULARY = 1000


class _Pictures(torch.utils.data.Dataset[Any]):
    """Random pictures with random captions."""

    def __init__(self, count: int, side: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pixels = torch.rand(count, 3, side, side, generator=generator) * 2 - 1
        self.captions = torch.randint(3, _VOCABULARY, (count, _TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Any:
        return {"pixel_values": self.pixels[index], "input_ids": self.captions[index], "label": index % 10}


def _loader(count: int, side: int, batch: int) -> Any:
    return torch.utils.data.DataLoader(_Pictures(count, side), batch_size=batch, shuffle=True, drop_last=True)


def _vae(channels: tuple[int, ...] = (64, 128, 128), latents: int = 4) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=channels,
        down_block_types=["DownEncoderBlock2D"] * len(channels),
        up_block_types=["UpDecoderBlock2D"] * len(channels),
        layers_per_block=1,
        latent_channels=latents,
        sample_size=128,
    )


def _text_encoder(width: int = 256, projection: bool = False) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, projection_dim=width, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config) if projection else CLIPTextModel(config)


def _conditional_unet(cross: int = 256, **options: Any) -> Any:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(128, 256, 256),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=cross,
        **options,
    )


@program("diffusers")
def diffusers_unconditional_unet() -> None:
    """DDPM on pixels: fp32, EMA on the card, sampling at the end of every epoch."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=64,
        layers_per_block=2,
        block_out_channels=(64, 128, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ).to("cuda")
    ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, model_cls=UNet2DModel)
    ema.to("cuda")
    schedule = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rate = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    loader = _loader(24, 64, 8)
    for _ in range(2):
        for batch in loader:
            images = batch["pixel_values"].to("cuda")
            noise = torch.randn(images.shape, device="cuda")
            steps = torch.randint(0, 1000, (len(images),), device="cuda", dtype=torch.int64)
            noisy = schedule.add_noise(images, noise, steps)
            loss = functional.mse_loss(model(noisy, steps, return_dict=False)[0], noise)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
            print("loss", loss.detach().item())
        ema.store(model.parameters())
        ema.copy_to(model.parameters())
        pipeline = DDPMPipeline(unet=model, scheduler=schedule)
        pipeline.set_progress_bar_config(disable=True)
        pipeline(batch_size=4, num_inference_steps=3, generator=torch.Generator().manual_seed(0), output_type="np")
        ema.restore(model.parameters())


def _text_to_image(dtype: torch.dtype, checkpointing: bool, foreach: bool) -> None:
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel, compute_snr

    torch.manual_seed(0)
    unet, vae, text = _conditional_unet(), _vae(), _text_encoder()
    vae.requires_grad_(False)
    text.requires_grad_(False)
    unet.train()
    vae.to("cuda", dtype=dtype)
    text.to("cuda", dtype=dtype)
    unet.to("cuda")
    if checkpointing:
        unet.enable_gradient_checkpointing()
    ema = EMAModel(unet.parameters(), model_cls=type(unet), model_config=unet.config, foreach=foreach)
    ema.to("cuda")
    schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, weight_decay=1e-2)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for index, batch in enumerate(_loader(16, 128, 4)):
        with torch.no_grad():
            latents = vae.encode(batch["pixel_values"].to("cuda", dtype)).latent_dist.sample()
            latents = latents * vae.config.scaling_factor
            states = text(batch["input_ids"].to("cuda"), return_dict=False)[0]
        noise = torch.randn_like(latents)
        steps = torch.randint(0, schedule.config.num_train_timesteps, (len(latents),), device="cuda").long()
        noisy = schedule.add_noise(latents, noise, steps)
        with torch.autocast("cuda", dtype):
            predicted = unet(noisy, steps, states, return_dict=False)[0]
        weights = compute_snr(schedule, steps)
        weights = torch.stack([weights, 5.0 * torch.ones_like(steps)], dim=1).min(dim=1)[0] / weights
        loss = functional.mse_loss(predicted.float(), noise.float(), reduction="none")
        loss = (loss.mean(dim=list(range(1, loss.ndim))) * weights).mean() / 2
        scaler.scale(loss).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            ema.step(unet.parameters())
        print("step", index, loss.item())
    with tempfile.NamedTemporaryFile() as file:
        torch.save({"unet": unet.state_dict(), "ema": ema.state_dict()}, file.name)


@program("diffusers", "transformers")
def diffusers_text_to_image_fp16() -> None:
    _text_to_image(torch.float16, checkpointing=False, foreach=False)


@program("diffusers", "transformers")
def diffusers_text_to_image_bf16_checkpointing() -> None:
    _text_to_image(torch.bfloat16, checkpointing=True, foreach=True)


@program("diffusers")
def diffusers_dit_bf16() -> None:
    """A class-conditional diffusion transformer on latents, EMA by hand as in DiT's own script."""
    import copy

    from diffusers import DDPMScheduler, DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=6, attention_head_dim=64, in_channels=4, out_channels=8, num_layers=4,
        sample_size=32, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
    ).to("cuda")  # fmt: skip
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    vae = _vae((32, 64, 64)).to("cuda").eval().requires_grad_(False)
    schedule = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    running = 0.0
    for index, batch in enumerate(_loader(40, 128, 8)):
        with torch.no_grad():
            latents = vae.encode(batch["pixel_values"].to("cuda")).latent_dist.sample().mul_(0.18215)
        labels = batch["label"].to("cuda")
        steps = torch.randint(0, 1000, (len(latents),), device="cuda")
        noise = torch.randn_like(latents)
        with torch.autocast("cuda", torch.bfloat16):
            output = model(schedule.add_noise(latents, noise, steps), timestep=steps, class_labels=labels).sample
            predicted, _ = output.chunk(2, dim=1)
            loss = functional.mse_loss(predicted, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                ema.get_parameter(name).mul_(0.9999).add_(parameter.data, alpha=1 - 0.9999)
        running += loss.item()
        if index % 2:
            print(f"{index} loss {running / 2:.4f}, {torch.cuda.max_memory_allocated() >> 20} MiB")
            running = 0.0


@program("diffusers")
def diffusers_sd3_flow_matching() -> None:
    """A small SD3 transformer in bf16 with flow matching, 8-step accumulation left out, EMA with foreach."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from diffusers.training_utils import (
        EMAModel,
        compute_density_for_timestep_sampling,
        compute_loss_weighting_for_sd3,
    )

    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=16, num_layers=3, attention_head_dim=64, num_attention_heads=4,
        joint_attention_dim=512, caption_projection_dim=256, pooled_projection_dim=256, out_channels=16,
        pos_embed_max_size=64,
    )  # fmt: skip
    model.to("cuda", torch.bfloat16)
    model.enable_gradient_checkpointing()
    schedule = FlowMatchEulerDiscreteScheduler()
    ema = EMAModel(model.parameters(), foreach=True)
    ema.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(4):
        latents = torch.randn(4, 16, 32, 32).to("cuda", torch.bfloat16)
        prompts, pooled = (
            torch.randn(4, 154, 512).to("cuda", torch.bfloat16),
            torch.randn(4, 256).to("cuda", torch.bfloat16),
        )
        noise = torch.randn_like(latents)
        density = compute_density_for_timestep_sampling("logit_normal", len(latents), 0.0, 1.0, 1.29)
        indices = (density * schedule.config.num_train_timesteps).long()
        steps = schedule.timesteps[indices].to("cuda")
        table = schedule.timesteps.to("cuda")
        sigmas = schedule.sigmas.to("cuda", torch.bfloat16)
        sigma = sigmas[[(table == step).nonzero().item() for step in steps]].flatten()[:, None, None, None]
        noisy = (1.0 - sigma) * latents + sigma * noise
        predicted = model(noisy, prompts, pooled, steps, return_dict=False)[0]
        predicted = predicted * (-sigma) + noisy
        weighting = compute_loss_weighting_for_sd3("logit_normal", sigma)
        loss = torch.mean((weighting.float() * (predicted.float() - latents.float()) ** 2).reshape(4, -1), 1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        print(loss.item())


def _xl_pipeline() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    unet = _conditional_unet(
        512,
        attention_head_dim=(4, 8, 8),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=32,
        transformer_layers_per_block=(1, 2, 2),
        projection_class_embeddings_input_dim=32 * 6 + 256,
    )
    pipeline = StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=_text_encoder(),
        text_encoder_2=_text_encoder(projection=True),
        tokenizer=None,
        tokenizer_2=None,
        unet=unet,
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(torch.float16)


def _xl_images(pipeline: Any, count: int = 2, side: int = 256) -> None:
    """What the pipeline's tokenizers would give it is random."""
    generator = torch.Generator("cpu").manual_seed(0)
    prompts, pooled = torch.randn(1, _TOKENS, 512).half(), torch.randn(1, 256).half()
    for _ in range(2):
        pipeline(
            prompt_embeds=prompts,
            pooled_prompt_embeds=pooled,
            negative_prompt_embeds=torch.zeros_like(prompts),
            negative_pooled_prompt_embeds=torch.zeros_like(pooled),
            num_images_per_prompt=count,
            num_inference_steps=4,
            height=side,
            width=side,
            generator=generator,
        )


@program("diffusers", "transformers")
def diffusers_sdxl_pipeline() -> None:
    pipeline = _xl_pipeline().to("cuda")
    _xl_images(pipeline)


@program("diffusers", "transformers")
def diffusers_sdxl_sliced_and_tiled() -> None:
    pipeline = _xl_pipeline().to("cuda")
    pipeline.enable_attention_slicing()
    pipeline.vae.enable_slicing()
    pipeline.vae.enable_tiling()
    _xl_images(pipeline, side=384)


@program("diffusers", "transformers", "accelerate")
def diffusers_sdxl_model_offload() -> None:
    pipeline = _xl_pipeline()
    pipeline.enable_model_cpu_offload()
    _xl_images(pipeline)


@program("diffusers", "transformers", "accelerate")
def diffusers_sdxl_sequential_offload() -> None:
    pipeline = _xl_pipeline()
    pipeline.enable_sequential_cpu_offload()
    _xl_images(pipeline, count=1)
