"""Neural style transfer with L-BFGS on the picture."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_default_device(device)
torch.manual_seed(3)
content_img, style_img = torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)


def vgg():
    layers, c = [], 3
    for v in (64, 64, "M", 128, 128, "M", 256):
        if v == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(c, v, 3, padding=1), nn.ReLU(inplace=True)]
            c = v
    return nn.Sequential(*layers).eval()


class ContentLoss(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.target = target.detach()

    def forward(self, input):
        self.loss = F.mse_loss(input, self.target)
        return input


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


class StyleLoss(nn.Module):
    def __init__(self, target_feature):
        super().__init__()
        self.target = gram_matrix(target_feature).detach()

    def forward(self, input):
        self.loss = F.mse_loss(gram_matrix(input), self.target)
        return input


class Normalization(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def forward(self, img):
        return (img - self.mean) / self.std


def get_model_and_losses(cnn):
    model, contents, styles, i = nn.Sequential(Normalization([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])), [], [], 0
    for layer in cnn.children():
        if isinstance(layer, nn.Conv2d):
            i += 1
            name = f"conv_{i}"
        elif isinstance(layer, nn.ReLU):
            name, layer = f"relu_{i}", nn.ReLU(inplace=False)
        else:
            name = f"pool_{i}"
        model.add_module(name, layer)
        if name == "conv_4":
            contents.append(ContentLoss(model(content_img).detach()))
            model.add_module(f"content_loss_{i}", contents[-1])
        if name.startswith("conv"):
            styles.append(StyleLoss(model(style_img).detach()))
            model.add_module(f"style_loss_{i}", styles[-1])
    return model, styles, contents


input_img = content_img.clone()
model, styles, contents = get_model_and_losses(vgg())
input_img.requires_grad_(True)
model.eval()
model.requires_grad_(False)
optimizer = optim.LBFGS([input_img])
run = [0]
while run[0] <= 20:

    def closure():
        with torch.no_grad():
            input_img.clamp_(0, 1)
        optimizer.zero_grad()
        model(input_img)
        style_score, content_score = 0, 0
        for sl in styles:
            style_score += sl.loss
        for cl in contents:
            content_score += cl.loss
        style_score *= 1000000
        loss = style_score + content_score
        loss.backward()
        run[0] += 1
        if run[0] % 50 == 0:
            print(f"Style Loss : {style_score.item():4f}")
        return style_score + content_score

    optimizer.step(closure)
with torch.no_grad():
    input_img.clamp_(0, 1)
